"""Makes timm importable beside a CPU build of torch."""

import torch


def _declare_torchvision_ops() -> None:
    """Let timm import where torchvision's compiled part does not fit torch (a CPU build).

    torchvision describes two of its detection ops to torch at import, which fails when the
    ops are missing. No test runs them, so declaring their schemas is enough.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT_ALIVE.append(library)
    except ImportError:
        pass


_KEPT_ALIVE: list[torch.library.Library] = []
_declare_torchvision_ops()
