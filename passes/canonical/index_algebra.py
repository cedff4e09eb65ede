"""Proofs about masks: an element of a tensor as an expression of its coordinates.

Models build attention masks out of `arange`, comparisons, views and index ops. Instead of running
those ops on one size and looking at the numbers, an element at coordinates (i0, i1, ...) is
written as a sympy expression and simplified; what comes out holds for every size.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from graphopt.graph import ops

aten = torch.ops.aten
Expr = Any
Coordinates = tuple[Expr, ...]


class OpaqueError(Exception):
    """The element depends on something that is not known at capture."""


def size_expr(size: Any) -> Expr:
    """A possibly symbolic size (or node of one) as a sympy expression."""
    if isinstance(size, fx.Node):
        size = size.meta["val"]
    if isinstance(size, (torch.SymInt, torch.SymFloat)):
        return size.node.expr
    if isinstance(size, bool):
        return sympy.true if size else sympy.false
    return sympy.sympify(size)


@dataclasses.dataclass
class Algebra:
    """Elements of tensors in one graph; remembers what it worked out.

    Attributes:
        steps: how many element expressions it may still build, a bound on its work.
    """

    steps: int = 2000
    known: dict[tuple[fx.Node, Coordinates], Expr] = dataclasses.field(default_factory=dict)

    def at(self, node: Any, where: Coordinates) -> Expr:
        """The element of a node at some coordinates.

        Raises:
            OpaqueError: when it depends on an input, on state, or on an op not known here.
        """
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            return size_expr(node)
        key = (node, where)
        if key not in self.known:
            self.steps -= 1
            handler = _HANDLERS.get(node.target)
            if handler is None or self.steps < 0:
                raise OpaqueError(
                    f"{node.name} ({ops.op_name(node.target)}) is not known at capture"
                )
            self.known[key] = handler(self, node, where)
        return self.known[key]

    def broadcast(self, node: Any, where: Coordinates) -> Expr:
        """The element of an operand that is broadcast to a result at some coordinates."""
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            return size_expr(node)
        shape = node.meta["val"].shape
        tail = where[len(where) - len(shape) :]
        return self.at(
            node, tuple(sympy.Integer(0) if s == 1 else c for s, c in zip(shape, tail, strict=True))
        )


def _arange(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    args = ops.arguments(node)
    if node.target is aten.arange.default:
        start, step = 0, 1
    else:
        start, step = args[0], args[2] if node.target is aten.arange.start_step else 1
    return size_expr(start) + size_expr(step) * where[0]


def _constant(value: Callable[[fx.Node], Any]) -> Callable[..., Expr]:
    def element(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
        found = size_expr(value(node))
        if node.meta["val"].dtype == torch.bool and found in (0, 1):
            return sympy.true if found == 1 else sympy.false
        return found

    return element


def _elementwise(function: Callable[..., Expr]) -> Callable[..., Expr]:
    def element(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
        left, right = (a.broadcast(arg, where) for arg in ops.arguments(node)[:2])
        return function(left, right)

    return element


def _sum(sign: int) -> Callable[..., Expr]:
    def element(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
        alpha = ops.argument(node, "alpha")
        left, right = (_number(a.broadcast(arg, where)) for arg in ops.arguments(node)[:2])
        return left + sign * size_expr(alpha) * right

    return element


def _number(value: Expr) -> Expr:
    """A truth value as 0 or 1 where it is used as a number."""
    if value is sympy.true:
        return sympy.Integer(1)
    if value is sympy.false:
        return sympy.Integer(0)
    if isinstance(value, sympy.logic.boolalg.Boolean) and not isinstance(value, sympy.Symbol):
        return sympy.Piecewise((1, value), (0, True))
    return value


def _truth(value: Expr) -> Expr:
    if isinstance(value, (sympy.logic.boolalg.Boolean, bool)) and not isinstance(
        value, sympy.Symbol
    ):
        return value
    return _relation(sympy.Ne, value)


def _relation(relation: Any, value: Expr) -> Expr:
    """A relation of a value to 0; of a choice between two numbers, the condition that decides."""
    if isinstance(value, sympy.Piecewise) and len(value.args) == 2:
        (first, condition), (second, _) = value.args
        if first.is_number and second.is_number:
            taken, otherwise = relation(first, 0), relation(second, 0)
            if taken == otherwise:
                return taken
            return condition if taken == sympy.true else sympy.Not(condition)
    return relation(value, 0)


def _compare(relation: Any) -> Callable[..., Expr]:
    def difference(x: Expr, y: Expr) -> Expr:
        x, y = _number(x), _number(y)
        if isinstance(x, sympy.Piecewise) and y.is_number:
            return sympy.Piecewise(*((value - y, condition) for value, condition in x.args))
        return x - y

    return _elementwise(lambda x, y: _relation(relation, difference(x, y)))


def _logic(function: Any) -> Callable[..., Expr]:
    def element(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
        if node.meta["val"].dtype != torch.bool:
            raise OpaqueError(f"{node.name} works on the bits of integers")
        return function(*(_truth(a.broadcast(arg, where)) for arg in ops.arguments(node)[:2]))

    return element


def _negation(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    if node.meta["val"].dtype != torch.bool:
        raise OpaqueError(f"{node.name} works on the bits of integers")
    return sympy.Not(_truth(a.at(ops.arguments(node)[0], where)))


def _same(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    return a.at(ops.arguments(node)[0], where)


def _cast(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    x, dtype = ops.arguments(node)[0].meta["val"].dtype, node.meta["val"].dtype
    value = a.at(ops.arguments(node)[0], where)
    if dtype == torch.bool:
        return _truth(value)
    if x == torch.bool or (not x.is_floating_point and dtype == torch.int64):
        return _number(value)
    if x == dtype:
        return value
    raise OpaqueError(f"{node.name} casts {x} to {dtype}, which may round")


def _unsqueeze(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    dim = ops.arguments(node)[1] % node.meta["val"].dim()
    return a.at(ops.arguments(node)[0], where[:dim] + where[dim + 1 :])


def _expand(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    return a.broadcast(ops.arguments(node)[0], where)


def _repeat(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    x, times = ops.arguments(node)
    sizes = x.meta["val"].shape
    inner = where[len(where) - len(sizes) :]
    counts = list(times)[len(where) - len(sizes) :]
    moved = []
    for size, count, c in zip(sizes, counts, inner, strict=True):
        if size != 1 and count != 1:
            raise OpaqueError(f"{node.name} repeats along a dim of several elements")
        moved.append(sympy.Integer(0) if size == 1 else c)
    return a.at(x, tuple(moved))


def _transpose(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    rank = len(where)
    order = list(where)
    i, j = (d % rank for d in ops.arguments(node)[1:3])
    order[i], order[j] = order[j], order[i]
    return a.at(ops.arguments(node)[0], tuple(order))


def _slice(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    _, dim, start, _, step = ops.arguments(node)
    dim = dim % len(where)
    if isinstance(start, int) and start < 0:
        raise OpaqueError(f"{node.name} slices from the end")
    moved = size_expr(start or 0) + size_expr(step) * where[dim]
    return a.at(ops.arguments(node)[0], (*where[:dim], moved, *where[dim + 1 :]))


def _select(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    _, dim, index = ops.arguments(node)
    dim = dim % (len(where) + 1)
    if isinstance(index, int) and index < 0:
        raise OpaqueError(f"{node.name} selects from the end")
    return a.at(ops.arguments(node)[0], (*where[:dim], size_expr(index), *where[dim:]))


def _index(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    x, indices = ops.arguments(node)
    shape = x.meta["val"].shape
    if len(indices) != len(shape) or any(i is None for i in indices):
        raise OpaqueError(f"{node.name} indexes only some dims")
    return a.at(x, tuple(a.broadcast(i, where) for i in indices))


def _diff(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    x, n, dim, prepend, append = ops.arguments(node)
    if n != 1 or append is not None:
        raise OpaqueError(f"{node.name} is a higher difference")
    dim = dim % len(where)
    here = where[dim]

    def element(source: fx.Node, index: Expr) -> Expr:
        return a.at(source, (*where[:dim], index, *where[dim + 1 :]))

    if prepend is None:
        return element(x, here + 1) - element(x, here)
    if prepend.meta["val"].shape[dim] != 1:
        raise OpaqueError(f"{node.name} has more than one element before it")
    # The first element is taken against what stands before, the others against their neighbour;
    # only where both are one expression does it describe every element.
    zero = sympy.Integer(0)
    first = element(x, zero) - element(prepend, zero)
    later = sympy.simplify(element(x, here) - element(x, here - 1))
    if sympy.simplify(first - later.subs(here, zero) if here.free_symbols else first - later) != 0:
        raise OpaqueError(f"{node.name} differs at its first element")
    return later


def _cumsum(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    x, dim = ops.arguments(node)[:2]
    dim = dim % len(where)
    value = _number(a.at(x, where))
    if (
        value.free_symbols & where[dim].free_symbols
        if hasattr(where[dim], "free_symbols")
        else False
    ):
        raise OpaqueError(f"{node.name} sums what changes along its dim")
    return value * (where[dim] + 1)


def _where(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
    condition = _truth(a.broadcast(ops.arguments(node)[0], where))
    if condition is sympy.true:
        return a.broadcast(ops.arguments(node)[1], where)
    if condition is sympy.false:
        return a.broadcast(ops.arguments(node)[2], where)
    return sympy.Piecewise(
        (_number(a.broadcast(ops.arguments(node)[1], where)), condition),
        (_number(a.broadcast(ops.arguments(node)[2], where)), True),
    )


def _triangle(relation: Any) -> Callable[..., Expr]:
    def element(a: Algebra, node: fx.Node, where: Coordinates) -> Expr:
        _, diagonal = ops.arguments(node)
        kept = relation(where[-1] - where[-2] - size_expr(diagonal), 0)
        value = a.at(ops.arguments(node)[0], where)
        if node.meta["val"].dtype == torch.bool:
            return sympy.And(_truth(value), kept)
        if value in (0, 1):
            return sympy.Piecewise((value, kept), (0, True))
        raise OpaqueError(f"{node.name} is a triangle of something else than ones")

    return element


_HANDLERS: dict[Any, Callable[[Algebra, fx.Node, Coordinates], Expr]] = {
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.ones.default: _constant(lambda n: 1),
    aten.zeros.default: _constant(lambda n: 0),
    aten.new_ones.default: _constant(lambda n: 1),
    aten.new_zeros.default: _constant(lambda n: 0),
    aten.ones_like.default: _constant(lambda n: 1),
    aten.zeros_like.default: _constant(lambda n: 0),
    aten.full.default: _constant(lambda n: ops.arguments(n)[1]),
    aten.new_full.default: _constant(lambda n: ops.arguments(n)[2]),
    aten.full_like.default: _constant(lambda n: ops.arguments(n)[1]),
    aten.scalar_tensor.default: _constant(lambda n: ops.arguments(n)[0]),
    aten.add.Tensor: _sum(1),
    aten.sub.Tensor: _sum(-1),
    aten.mul.Tensor: _elementwise(lambda x, y: _number(x) * _number(y)),
    aten.neg.default: lambda a, n, w: -_number(a.at(ops.arguments(n)[0], w)),
    aten.le.Tensor: _compare(sympy.Le),
    aten.le.Scalar: _compare(sympy.Le),
    aten.lt.Tensor: _compare(sympy.Lt),
    aten.lt.Scalar: _compare(sympy.Lt),
    aten.ge.Tensor: _compare(sympy.Ge),
    aten.ge.Scalar: _compare(sympy.Ge),
    aten.gt.Tensor: _compare(sympy.Gt),
    aten.gt.Scalar: _compare(sympy.Gt),
    aten.eq.Tensor: _compare(sympy.Eq),
    aten.eq.Scalar: _compare(sympy.Eq),
    aten.ne.Tensor: _compare(sympy.Ne),
    aten.ne.Scalar: _compare(sympy.Ne),
    aten.__and__.Tensor: _logic(sympy.And),
    aten.bitwise_and.Tensor: _logic(sympy.And),
    aten.logical_and.default: _logic(sympy.And),
    aten.__or__.Tensor: _logic(sympy.Or),
    aten.bitwise_or.Tensor: _logic(sympy.Or),
    aten.logical_or.default: _logic(sympy.Or),
    aten.logical_not.default: lambda a, n, w: sympy.Not(_truth(a.at(ops.arguments(n)[0], w))),
    aten.bitwise_not.default: _negation,
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.to.device: _cast,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.detach.default: _same,
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.transpose.int: _transpose,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.index.Tensor: _index,
    aten.diff.default: _diff,
    aten.cumsum.default: _cumsum,
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
    aten.where.Scalar: _where,
    aten.tril.default: _triangle(sympy.Le),
    aten.triu.default: _triangle(sympy.Ge),
    operator.getitem: lambda a, n, w: _opaque(n),
}


def _opaque(node: fx.Node) -> Expr:
    raise OpaqueError(f"{node.name} is part of another result")


@dataclasses.dataclass(frozen=True)
class Mask:
    """What is known about a mask of [..., query, key].

    Attributes:
        kind: "all" (every key may be seen), "causal" (key <= query), or "none" for neither.
        reason: why it could not be proved, for "none".
    """

    kind: str
    reason: str = ""


def mask_kind(node: fx.Node, *, hides: bool = False) -> Mask:
    """Prove that a mask lets every key be seen, or exactly those up to the query.

    Args:
        node: a boolean mask (True: may be seen) or an additive one (0, or minus much).
        hides: a boolean mask is the other way round (True: hidden), as masked_fill takes it.
    """
    value = node.meta["val"]
    rank = value.dim()
    names = [f"b{i}" for i in range(rank - 2)] + ["query", "key"]
    coordinates = tuple(sympy.Symbol(n, integer=True, nonnegative=True) for n in names[-rank:])
    if rank < 2:
        return Mask("none", f"it has {rank} dims")
    try:
        found = Algebra().at(node, coordinates)
    except OpaqueError as why:
        return Mask("none", str(why))
    seen = _seen(found, value.dtype)
    if seen is None:
        return Mask("none", f"its elements are {found}")
    seen = sympy.Not(seen) if hides else seen
    query, key = coordinates[-2:]
    seen = _within(seen, {query: value.shape[-2], key: value.shape[-1]})
    if seen is sympy.true:
        return Mask("all")
    # Every relation is normalized by sympy's own canonical form before it is compared.
    if _is(seen, sympy.Le(key - query, 0)):
        return Mask("causal")
    return Mask("none", f"a key is seen where {seen}")


def _seen(found: Expr, dtype: torch.dtype) -> Expr | None:
    """The condition under which a key is seen, None where the mask is not of that kind."""
    if dtype == torch.bool:
        return _truth(found)
    if found.is_number and float(found) == 0:
        return sympy.true
    lowest = torch.finfo(dtype).min if dtype.is_floating_point else None
    if lowest is None or not isinstance(found, sympy.Piecewise) or len(found.args) != 2:
        return None
    (kept, condition), (masked, _) = found.args
    if not kept.is_number or float(kept) != 0:
        return None
    if masked.is_number and (masked == -sympy.oo or float(masked) <= lowest / 2):
        return condition
    return None


def _within(condition: Expr, sizes: dict[Expr, Any]) -> Expr:
    """Drop the relations that hold for every coordinate inside the sizes."""
    if isinstance(condition, sympy.And):
        kept = [_within(part, sizes) for part in condition.args]
        return sympy.And(*kept)
    if isinstance(condition, (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)):
        gap = condition.lhs - condition.rhs
        if isinstance(condition, (sympy.Ge, sympy.Gt)):
            gap = -gap
        top = _upper(sympy.expand(gap), sizes)
        strict = isinstance(condition, (sympy.Lt, sympy.Gt))
        if top is not None and (top < 0 if strict else top <= 0):
            return sympy.true
    return condition


def _upper(gap: Expr, sizes: dict[Expr, Any]) -> int | None:
    """The largest value of a linear expression of the coordinates, where sizes are known."""
    total: Any = 0
    for term in sympy.Add.make_args(gap):
        factor, rest = term.as_coeff_Mul()
        if rest == 1:
            total += factor
        elif rest in sizes and isinstance(sizes[rest], int):
            total += factor * (sizes[rest] - 1) if factor > 0 else 0
        elif rest in sizes and factor < 0:
            total += 0
        else:
            return None
    return int(total)


def _is(found: Expr, wanted: Expr) -> bool:
    if found == wanted or getattr(found, "canonical", None) == wanted.canonical:
        return True
    try:
        gap = found.lhs - found.rhs
    except AttributeError:
        return False
    if isinstance(found, (sympy.Ge, sympy.Gt)):
        gap = -gap
    if isinstance(found, (sympy.Lt, sympy.Gt)):
        gap = gap + 1  # of integers, "less than 0" is "at most -1"
    if not isinstance(found, (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)) or not gap.is_integer:
        return False
    return bool(sympy.expand(gap - (wanted.lhs - wanted.rhs)) == 0)
