"""Stage 0: a graph with in-place operations made pure.

Every tensor of the exported program is an alias: a chain of view operations over a root. A write
to an alias becomes a functional operation, whose result is put back into the root through the
inverse of each view; a later read of any alias of that root replays its chain from the root's new
value. What was written to inputs and state is given out as extra results, for the epilogue.
"""

from __future__ import annotations

import dataclasses
import operator
from functools import partial
from typing import Any

import torch
from torch import fx

from graphopt.capture.aliases import (
    FRESH,
    SELVES,
    Alias,
    Parts,
    Returned,
    View,
    check_write,
    functional_overload,
    is_dropout_off,
    nodes_in,
    op_name,
    refusal,
    targets,
    without_out,
    written_storages,
)
from graphopt.capture.normalize import Flat, storage_of
from graphopt.capture.values import Values
from graphopt.capture.views import (
    IN_PLACE_VIEWS,
    INVERSES,
    laid_out_as,
    write_over,
    write_part,
)
from graphopt.graph.body import CONSTANTS, Mutation

aten = torch.ops.aten


@dataclasses.dataclass
class Functional:
    """A pure graph and what its epilogue must do.

    Attributes:
        graph: the pure graph; its output is the user's results, then the mutated values.
        mutations: what the extra results are written to.
        returned: position of a user result -> what it is, for results that are, in eager, the very
            input or state tensor that was written to, or a view of it.
    """

    graph: fx.Graph
    mutations: tuple[Mutation, ...]
    returned: dict[int, Returned]


def functionalize(flat: Flat) -> Functional:
    """Make a flat graph pure.

    Args:
        flat: what `normalize` returned.

    Returns:
        The same graph when nothing mutates; otherwise a new one.

    Raises:
        CaptureError: names the operation and the user's line where a write cannot be expressed.
    """
    written = written_storages(flat.graph)
    if not written:
        return Functional(flat.graph, (), {})
    return _Functionalizer(flat, written).run()


class _Functionalizer(Values):
    def run(self) -> Functional:
        results: list[Any] = []
        for node in self.flat.graph.nodes:
            self.at = node
            if node.op == "output":
                results = list(node.args[0])
            elif node.op in ("placeholder", "get_attr"):
                self._input(node)
            elif targets(node):
                self._write(node)
            else:
                self._compute(node)
        return self._finish(results)

    def _finish(self, results: list[Any]) -> Functional:
        returned: dict[int, Returned] = {}
        values: list[Any] = []
        for i, result in enumerate(results):
            alias = self.env.get(result) if isinstance(result, fx.Node) else None
            memory = self._returned(result)
            if memory is not None:
                returned[i] = memory
            value = self._read(result, replay=True) if alias is not None else result
            if i not in returned and isinstance(value, fx.Node):
                like = (alias.node if isinstance(alias, Alias) else result).meta["val"]
                value = self._laid_out_as(like, value)
            values.append(value)
        mutations = []
        for root in self.roots:
            if root.outside():
                mutations.append(Mutation(len(values), root.kind, root.target))
                values.append(root.value)
        self.graph.output(tuple(values))
        return Functional(self.graph, tuple(mutations), returned)

    def _laid_out_as(self, want: Any, new: fx.Node) -> fx.Node:
        return laid_out_as(partial(self._emit, like=new), want, new)

    def _returned(self, result: Any) -> Returned | None:
        """How a result is made of an input or state that was written to, if it is one of these.

        Raises:
            CaptureError: for a view that cannot be taken after the write.
        """
        alias = self.env.get(result) if isinstance(result, fx.Node) else None
        if not isinstance(alias, Alias) or not alias.root.outside():
            return None
        root = alias.root
        if root.kind == "buffer" and root.grads:
            return None
        views = []
        while alias.parent is not None:
            node: Any = alias.node
            if alias.part is not None:
                node = self.env[node.args[0]].node
            _, *rest = node.args
            if nodes_in((rest, node.kwargs)):
                raise refusal(
                    self.at,
                    f"makes a result that is a view ({node.target}) of memory"
                    " that it writes to, with a computed size",
                )
            views.append((node.target, tuple(rest), dict(node.kwargs), alias.part))
            alias = alias.parent
        return Returned(root.kind, root.target, tuple(reversed(views)))

    # ---- reading

    def _input(self, node: fx.Node) -> None:
        new = self.graph.node_copy(node)
        if storage_of(node) not in self.written:
            self.env[node] = new
            return
        kind, target = "input", new.name
        if node.op == "get_attr":
            kind, target = self._state_kind(str(node.target))
        self._root(node, new, kind, target)

    def _state_kind(self, path: str) -> tuple[str, str]:
        if path.startswith(CONSTANTS + "."):
            return "constant", path
        return ("parameter" if path in self.flat.parameters else "buffer"), path

    # ---- operations that do not write

    def _compute(self, node: fx.Node) -> None:
        given: tuple[Any, ...] = node.args
        if node.target is operator.getitem and isinstance(self.env[given[0]], Parts):
            parts = self.env[given[0]]
            self.env[node] = Alias(parts.parent.root, parts.parent, node, given[1])
            return
        parent = self._parent(node)
        if parent is not None:
            if isinstance(node.meta.get("val"), (list, tuple)):
                self.env[node] = Parts(parent, node)
            elif op_name(node) in SELVES:
                self.env[node] = parent
            else:
                self.env[node] = Alias(parent.root, parent, node, None)
            return
        new = self.graph.node_copy(node, self._read)
        if storage_of(node) in self.written:
            self._root(node, new, "intermediate", new.name)
        else:
            self.env[node] = new

    def _parent(self, node: fx.Node) -> Alias | None:
        """The written-to alias that this operation's result is a view of, if any."""
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.name in FRESH:
            return None
        first = node.args[0] if node.args else None
        held = self.env.get(first) if isinstance(first, fx.Node) else None
        if not isinstance(held, Alias) or not isinstance(first, fx.Node):
            return None
        if is_dropout_off(node):
            return held
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        for v in values:
            if isinstance(v, torch.Tensor):
                base = first.meta["val"].untyped_storage()._cdata
                return held if v.untyped_storage()._cdata == base else None
        return None

    # ---- operations that write

    def _write(self, node: fx.Node) -> None:
        target: Any = node.target
        name = target._schema.name.partition("::")[2]
        if name == "batch_norm":
            self._batch_norm(node)
            return
        written = targets(node)
        if len(written) == 1 and written[0] is node.kwargs.get("out"):
            self._write_out(node)
            return
        if len(written) != 1 or written[0] is not node.args[0]:
            raise refusal(node, "writes to several tensors, or to one that is not its first")
        if name in ("resize_", "resize_as_", "set_"):
            raise refusal(node, "changes the memory of a tensor")
        alias = self.env[written[0]]
        if name in IN_PLACE_VIEWS:
            self._reshape_in_place(node, alias, name)
            return
        new = self._functional(node, name)
        self._assign(node, alias, new)
        self.env[node] = alias

    def _write_out(self, node: fx.Node) -> None:
        """An operation that writes its result to `out=`."""
        out: Any = node.kwargs["out"]
        op = without_out(node.target)
        if op is None:
            raise refusal(node, "has no counterpart without out=")
        given = {k: v for k, v in node.kwargs.items() if k != "out"}
        args, kwargs = fx.map_arg((node.args, given), self._read)
        new = self._emit(op, *args, like=node, **kwargs)
        value, like = new.meta["val"], node.meta["val"]
        if tuple(value.shape) != tuple(out.meta["val"].shape):
            raise refusal(node, "changes the size of out=")
        if value.dtype != like.dtype:
            new = self._emit(aten.to.dtype, new, like.dtype, like=node)
        alias = self.env[out]
        self._assign(node, alias, new)
        self.env[node] = alias

    def _functional(self, node: fx.Node, name: str) -> fx.Node:
        """Emit the functional form of an in-place operation, in the dtype of what it writes to."""
        first: Any
        first, *rest = node.args
        args, kwargs = fx.map_arg((tuple(rest), node.kwargs), self._read)
        base, like = self._read(first), node.meta["val"]
        if name == "copy_":
            new = self._broadcast(node, args[0], like)
            if self.env[first].root.grads:
                new = write_over(partial(self._emit, like=node), base, new)
        elif name == "zero_":
            new = self._emit(aten.fill.Scalar, base, 0, like=node)
        elif name == "detach_":
            new = self._emit(aten.detach.default, base, like=node)
        else:
            op = functional_overload(node.target, name)
            if op is None:
                raise refusal(node, "has no out-of-place counterpart")
            new = self._emit(op, base, *args, like=node, **kwargs)
        value = new.meta["val"]
        if value.dtype != like.dtype:
            new = self._emit(aten.to.dtype, new, like.dtype, like=node)
        if self.env[first].root.kind == "intermediate":  # what follows was traced with its strides
            new = self._laid_out_as(like, new)
        return new

    def _broadcast(self, node: fx.Node, source: Any, like: torch.Tensor) -> fx.Node:
        """What `copy_` leaves: the source in the shape, dtype and device of the target."""
        value = source.meta["val"]
        if value.device != like.device:
            args = (like.device, like.dtype)
            source = self._emit(aten.to.device, source, *args, like=node)
        elif value.dtype != like.dtype:
            source = self._emit(aten.to.dtype, source, like.dtype, like=node)
        if tuple(value.shape) != tuple(like.shape):
            target = self._read(node.args[0])
            source = self._emit(aten.expand_as.default, source, target, like=node)
        return source

    def _assign(self, node: fx.Node, alias: Alias, new: fx.Node) -> None:
        """Give an alias a new value, and its root with it."""
        root = alias.root
        check_write(node, root, node in self.flat.grads)
        value = new
        links: list[Alias] = []
        step: Alias = alias
        while step.parent is not None:
            value = self._put_back(node, step, value)
            links.append(step)
            step = step.parent
        root.value = value
        root.version += 1
        root.cut = root.cut or (root.kind == "parameter" and root.grads)
        root.grads = root.grads or node in self.flat.grads
        if alias.parent is not None:
            alias.cached, alias.version = new, root.version

    def _put_back(self, node: fx.Node, alias: Alias, new: fx.Node) -> fx.Node:
        """The parent's value after one of its views took a new value."""
        view: Any = alias.node
        parent = alias.parent
        assert parent is not None
        base = self._current(parent)
        emit = partial(self._emit, like=node)
        if alias.part is not None:
            source: Any = view.args[0]
            _, *rest = source.args
            op = op_name(source)
            dim = source.kwargs.get("dim")
            rest = rest if dim is None else [*rest, dim]
            return write_part(emit, base, new, op, rest, alias.part)
        inverse = INVERSES.get(op_name(view))
        if inverse is None:
            raise refusal(node, f"writes to a view made by {view.target}, which has no inverse")
        _, *rest = view.args
        args, kwargs = fx.map_arg((tuple(rest), view.kwargs), self._read)
        try:
            if inverse.__name__ in ("_reshape", "_same", "_expand"):
                return inverse(emit, base, new)
            return inverse(emit, base, new, *args, **kwargs)
        except (NotImplementedError, TypeError):
            raise refusal(node, f"writes to a view made by {view.target}") from None

    def _reshape_in_place(self, node: fx.Node, alias: Alias, name: str) -> None:
        """`t_` and its kind: the tensor object becomes a view of what it was."""
        overload = functional_overload(node.target, name)
        if overload is None or alias.root.kind != "intermediate":
            raise refusal(node, "changes the shape of an input or of state")
        view = View(overload, node.args, node.kwargs, node.meta)
        after = Alias(alias.root, alias, view, None)
        for old, held in self.env.items():
            if held is alias:
                self.env[old] = after
        self.env[node] = after

    def _batch_norm(self, node: fx.Node) -> None:
        """Training-mode batch norm: its running statistics become results."""
        if op_name(node) != "batch_norm":
            raise refusal(node, "updates running statistics")
        old: tuple[Any, ...] = node.args
        x, weight, bias, mean, var, _, momentum, eps = [self._read(a) for a in old[:8]]
        args = (x, weight, bias, mean, var, momentum, eps)
        import graphopt.kernels.functional  # noqa: F401  (registers the operator)

        op = torch.ops.graphopt.batch_norm.default
        both = self._emit(op, *args, like=node)
        both.meta["val"] = (node.meta["val"], mean.meta["val"], var.meta["val"])
        y, new_mean, new_var = (self._emit(operator.getitem, both, i, like=node) for i in range(3))
        y.meta["val"] = node.meta["val"]
        self._assign(node, self.env[old[3]], new_mean)
        self._assign(node, self.env[old[4]], new_var)
        if storage_of(node) in self.written:
            self._root(node, y, "intermediate", y.name)
        else:
            self.env[node] = y
