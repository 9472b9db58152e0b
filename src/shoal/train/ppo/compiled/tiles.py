"""Vector instructions for the compiled network: the few inner loops that a plain loop leaves slow.

Each is written as LLVM vectors of 16 floats, which LLVM maps on whatever the CPU has (AVX-512, AVX2, NEON),
with fused multiply-adds in a fixed order: a row's result never depends on the rows computed beside it. Beside them
what two threads need to share an update: counters that both may move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
_FLOAT, _INT, _INDEX = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _splat(builder: Any, scalar: Any) -> Any:
    """One float in all lanes."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _INDEX(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INDEX, LANES), [0] * LANES))


def _constant(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _intrinsic(builder: Any, name: str, count: int) -> Any:
    """The LLVM vector function `name` with `count` vector arguments."""
    full = f"llvm.{name}.v{LANES}f32"
    known = builder.module.globals.get(full)
    return known or ir.Function(builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * count), full)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.call(_intrinsic(builder, "fma", 3), [a, b, c])


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()))
    value.align = 4
    return value


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, _VECTOR.as_pointer())).align = 4


def _pointer(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [offset])


def _make_tile(rows: int, vectors: int) -> Callable[..., Any]:
    """A `rows x 16*vectors` block of `C = A @ B (+ C)`, kept in registers over the whole sum."""

    @intrinsic
    def tile(
        typing: Any, k: Any, a: Any, a_at: Any, a_row: Any, a_k: Any, b: Any, b_at: Any, b_row: Any,
        c: Any, c_at: Any, c_row: Any, bias: Any, bias_at: Any,
    ) -> Any:  # fmt: skip
        index = types.int64
        signature = types.void(
            index, a, index, index, index, b, index, index, c, index, index, bias, index
        )  # fmt: skip

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            n_k, a_, a_at_, a_row_, a_k_, b_, b_at_, b_row_, c_, c_at_, c_row_, bias_, bias_at_ = args
            kinds = signature.args
            a_base = _pointer(context, builder, kinds[1], a_, a_at_)
            b_base = _pointer(context, builder, kinds[5], b_, b_at_)
            c_base = _pointer(context, builder, kinds[8], c_, c_at_)
            bias_base = _pointer(context, builder, kinds[11], bias_, bias_at_)
            before = builder.block
            with builder.if_then(builder.icmp_signed(">=", bias_at_, _INT(0))):
                given = [_load(builder, builder.gep(bias_base, [_INT(LANES * j)])) for j in range(vectors)]
                with_bias = builder.block
            start = []
            for j in range(vectors):
                phi = builder.phi(_VECTOR)
                phi.add_incoming(_constant(0.0), before)
                phi.add_incoming(given[j], with_bias)
                start.append(phi)
            entry = builder.block
            head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
            builder.branch(head)
            builder.position_at_end(head)
            step = builder.phi(_INT)
            step.add_incoming(_INT(0), entry)
            sums = [[builder.phi(_VECTOR) for _ in range(vectors)] for _ in range(rows)]
            for row in sums:
                for phi, first in zip(row, start, strict=True):
                    phi.add_incoming(first, entry)
            builder.cbranch(builder.icmp_signed("<", step, n_k), body, end)
            builder.position_at_end(body)
            b_line = builder.gep(b_base, [builder.mul(step, b_row_)])
            b_values = [_load(builder, builder.gep(b_line, [_INT(LANES * j)])) for j in range(vectors)]
            a_column = builder.gep(a_base, [builder.mul(step, a_k_)])
            for r, row in enumerate(sums):
                value = _splat(builder, builder.load(builder.gep(a_column, [builder.mul(_INT(r), a_row_)])))
                for phi, b_value in zip(row, b_values, strict=True):
                    phi.add_incoming(_fma(builder, value, b_value, phi), body)
            step.add_incoming(builder.add(step, _INT(1)), body)
            builder.branch(head)
            builder.position_at_end(end)
            for r, row in enumerate(sums):
                c_line = builder.gep(c_base, [builder.mul(_INT(r), c_row_)])
                for j, phi in enumerate(row):
                    _store(builder, phi, builder.gep(c_line, [_INT(LANES * j)]))
            return context.get_dummy_value()

        return signature, generate

    return cast(Callable[..., Any], tile)


tile_4x4 = _make_tile(4, 4)
tile_1x4 = _make_tile(1, 4)
tile_4x1 = _make_tile(4, 1)
tile_1x1 = _make_tile(1, 1)

# tanh(x) = x P(x^2) / Q(x^2) on [-8.2, 8.2], constant outside: our own fit, relative error 4e-7 in float32.
# Highest power first.
_TANH_LIMIT = 8.2
_TANH_P = (1.48406130015e-08, 2.1637314836e-05, 0.00355668876783, 0.134321250055, 0.99999999175)
_TANH_Q = (8.3706266301e-07, 0.000338644509531, 0.0261083078553, 0.46765450748, 1.0)


def _polynomial(builder: Any, x: Any, coefficients: tuple[float, ...]) -> Any:
    value = _constant(coefficients[0])
    for coefficient in coefficients[1:]:
        value = _fma(builder, value, x, _constant(coefficient))
    return value


@intrinsic
def tanh_16(typing: Any, x: Any, at: Any) -> Any:
    """Replace 16 floats of `x` from `at` on by their hyperbolic tangent; NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        value = _load(builder, pointer)
        for sign, limit in ((">", _TANH_LIMIT), ("<", -_TANH_LIMIT)):
            bound = _constant(limit)
            value = builder.select(builder.fcmp_ordered(sign, value, bound), bound, value)
        square = builder.fmul(value, value)
        over = builder.fmul(value, _polynomial(builder, square, _TANH_P))
        _store(builder, builder.fdiv(over, _polynomial(builder, square, _TANH_Q)), pointer)
        return context.get_dummy_value()

    return types.void(x, types.int64), generate


@intrinsic
def tanh_slope_16(typing: Any, delta: Any, at: Any, hidden: Any, hidden_at: Any) -> Any:
    """Multiply 16 floats of `delta` by the derivative `1 - h^2` of the tanh whose values `hidden` holds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        value = _load(builder, _pointer(context, builder, signature.args[2], args[2], args[3]))
        slope = _fma(builder, builder.fneg(value), value, _constant(1.0))
        _store(builder, builder.fmul(_load(builder, pointer), slope), pointer)
        return context.get_dummy_value()

    return types.void(delta, types.int64, hidden, types.int64), generate


@intrinsic
def dot(typing: Any, n: Any, a: Any, a_at: Any, b: Any, b_at: Any) -> Any:
    """The inner product of `n` floats (a multiple of 16): lane by lane, then the lanes in a fixed tree."""
    signature = types.float32(types.int64, a, types.int64, b, types.int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count, a_, a_at_, b_, b_at_ = args
        a_base = _pointer(context, builder, signature.args[1], a_, a_at_)
        b_base = _pointer(context, builder, signature.args[3], b_, b_at_)
        entry = builder.block
        head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        step, total = builder.phi(_INT), builder.phi(_VECTOR)
        step.add_incoming(_INT(0), entry)
        total.add_incoming(_constant(0.0), entry)
        builder.cbranch(builder.icmp_signed("<", step, count), body, end)
        builder.position_at_end(body)
        left, right = (_load(builder, builder.gep(base, [step])) for base in (a_base, b_base))
        total.add_incoming(_fma(builder, left, right, total), body)
        step.add_incoming(builder.add(step, _INT(LANES)), body)
        builder.branch(head)
        builder.position_at_end(end)
        value, width = total, LANES
        while width > 1:
            width //= 2
            other = builder.shuffle_vector(
                value,
                value,
                ir.Constant(ir.VectorType(_INDEX, LANES), [(i + width) % LANES for i in range(LANES)]),
            )
            value = builder.fadd(value, other)
        return builder.extract_element(value, _INDEX(0))

    return signature, generate


@intrinsic
def atomic_load(typing: Any, counters: Any, at: Any) -> Any:
    """The counter at `at` of an int64 array, and with it all that was written before it was moved there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature.args[0], *args), "acquire", 8)

    return types.int64(counters, types.int64), generate


@intrinsic
def atomic_step(typing: Any, counters: Any, at: Any, expected: Any) -> Any:
    """Move a counter from `expected` to the next number; whether it stood there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        moved = builder.cmpxchg(pointer, args[2], builder.add(args[2], _INT(1)), "acq_rel", "acquire")
        return builder.extract_value(moved, 1)

    return types.boolean(counters, types.int64, types.int64), generate


@intrinsic
def yield_core(typing: Any, address: Any) -> Any:
    """Call the function without arguments at `address`, the system's own to let other threads run."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), []).as_pointer()
        builder.call(builder.inttoptr(args[0], function), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate
