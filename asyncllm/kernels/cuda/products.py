"""Products of up to 16 rows of activations: bound by how fast weights come from memory.

A program owns a few whole rows of the weight, its warps side by side along them, a thread to a
sub-block of 32 columns. Weights of the first steps are all asked for before anything is waited
for; long rows go on in a loop that stays two steps ahead.
"""

# ruff: noqa: RUF005
# The language of kernels has tuples without unpacking.

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.cuda.rows import half_norm_parts
from asyncllm.kernels.cuda.spelling import (
    EMULATED,
    EXPONENT,
    SUPER,
    await_inputs,
    depend,
    dots,
    first_half,
    form_of,
    load_part,
    power,
    quarters,
    second_half,
    spell,
)
from asyncllm.kernels.cuda.weights import DeviceWeight

Config = tuple[int, int]
"""Warps of a program, rows of the weight that it owns."""

QuantisedRows = tuple[Tensor, Tensor, Tensor]
"""int32 [M, 2, K / 8], float32 [M, K / 32], int32 [M, K / 32]: bytes, scales, sums of 16."""

MOST_ROWS: Final = 16

# Steps of a program times its rows that are asked for at once: what registers hold.
_IN_FLIGHT: Final = 8


@triton.jit
def _stacked(values, COUNT: tl.constexpr, S: tl.constexpr):
    """COUNT, a power of 2, tensors [S] as one [S, COUNT]."""
    for level in tl.static_range(8):
        if COUNT >> level > 1:
            paired = ()
            for i in tl.static_range(COUNT >> (level + 1)):
                paired = paired + (tl.join(values[i], values[i + (COUNT >> (level + 1))]),)
            values = paired
    return tl.reshape(values[0], [S, COUNT])


@triton.jit
def _activation(gate, GELU: tl.constexpr):
    # Beyond 80 only the exponential still changes, and overflows in the end.
    if GELU:
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (1.0 + tl.exp(tl.minimum(2.0 * z, 80.0))))
    else:
        return gate / (1.0 + tl.exp(tl.minimum(-gate, 80.0)))


@triton.jit
def _dot(codes, part, x, scale, sums_low, sums_high, FORM: tl.constexpr, EMU: tl.constexpr):
    """What each sub-block adds to the product of a row of the weight by a row of activations."""
    OFFSET: tl.constexpr = FORM[1]
    GROUP: tl.constexpr = FORM[3]
    MINIMUM: tl.constexpr = FORM[4]
    SCALE: tl.constexpr = FORM[5]
    PARTS: tl.constexpr = FORM[6]
    low, high = dots(codes, x, FORM, EMU)
    if SCALE == SUPER:
        s = part[PARTS - 2].to(tl.int32)
        d = part[PARTS - 1]
        if GROUP == 16:
            if OFFSET > 0:
                low -= OFFSET * sums_low
                high -= OFFSET * sums_high
            if MINIMUM:
                i = (s & 255) * low + ((s >> 8) & 255) * high
                least = ((s >> 16) & 255) * sums_low + ((s >> 24) & 255) * sums_high
            else:
                i = ((s << 24) >> 24) * low + (s >> 8) * high
        elif MINIMUM:
            i = (s & 255) * (low + high)
            least = ((s >> 8) & 255) * (sums_low + sums_high)
        else:
            i = s * (low + high)
        if MINIMUM:
            value = first_half(d) * i.to(tl.float32) - second_half(d) * least.to(tl.float32)
        else:
            value = d.to(tl.float32) * i.to(tl.float32)
    else:
        d = part[PARTS - 1]
        i = low + high
        if OFFSET > 0:
            i -= OFFSET * (sums_low + sums_high)
        if SCALE == EXPONENT:
            value = power(d.to(tl.int32)) * i.to(tl.float32)
        elif MINIMUM:
            sums = (sums_low + sums_high).to(tl.float32)
            value = first_half(d) * i.to(tl.float32) + second_half(d) * sums
        else:
            value = d.to(tl.float32) * i.to(tl.float32)
    return scale * value


@triton.jit
def _load_rows(one, other, row0, N, step, SUBS, S, MASKED, R, ROWS, FORM):
    """What R rows of a weight, and as many of the other if ROWS is twice R, have for a step."""
    parts = ()
    for r in tl.static_range(ROWS):
        # Rows beyond the last are the last one again, and not stored.
        row = tl.minimum(row0 + r % R, N - 1).to(tl.int64)
        if r < R:
            parts = parts + load_part(*one, row, step, SUBS, S, MASKED, FORM)
        else:
            parts = parts + load_part(*other, row, step, SUBS, S, MASKED, FORM)
    return parts


@triton.jit
def _step(parts, sums, xq, xd, xs, step, SUBS, S, M, ROWS, MASKED, FORM, EMU):
    """The sums [row of activations * ROWS + row of the weight] after another step."""
    PARTS: tl.constexpr = FORM[6]
    c1 = step * S + tl.arange(0, S)
    c4 = step * (4 * S) + tl.arange(0, 4 * S)
    if MASKED:
        m1 = c1 < SUBS
        m4 = c4 < SUBS * 4
    else:
        m1 = None
        m4 = None
    z = 0 if MASKED else None
    codes = ()
    for r in tl.static_range(ROWS):
        codes = codes + spell(parts[r * PARTS : (r + 1) * PARTS], S, FORM, EMU)
    after = ()
    for m in tl.static_range(M):
        words = xq + m * (SUBS * 8) + c4
        x = quarters(tl.load(words, mask=m4, other=z), S)
        x = x + quarters(tl.load(words + SUBS * 4, mask=m4, other=z), S)
        scale = tl.load(xd + m * SUBS + c1, mask=m1, other=z)
        both = tl.load(xs + m * SUBS + c1, mask=m1, other=z)
        for r in tl.static_range(ROWS):
            part = parts[r * PARTS : (r + 1) * PARTS]
            eight = codes[r * 8 : (r + 1) * 8]
            more = _dot(eight, part, x, scale, (both << 16) >> 16, both >> 16, FORM, EMU)
            after = after + (sums[m * ROWS + r] + more,)
    return after


@triton.jit
def _finish(
    sums,
    squares,
    eps,
    residual,
    bias,
    out,
    row0,
    N,
    residual_stride,
    out_stride,
    K,
    M,
    R,
    P,
    S,
    ROWS,
    ACT,
    RES,
    BIAS,
    SQUARES,
):
    """Add up what the threads have and store it: P is M * R or the power of 2 above.

    `squares` [parts, P]: where SQUARES, of rows that were not divided by their size.
    """
    first = ()
    second = ()
    for p in tl.static_range(P):
        if p < M * R:
            first = first + (sums[p // R * ROWS + p % R],)
            if ROWS > R:
                second = second + (sums[p // R * ROWS + R + p % R],)
        else:
            first = first + (sums[0] * 0,)
            if ROWS > R:
                second = second + (sums[0] * 0,)
    value = tl.sum(_stacked(first, P, S), 0)
    factor = 1.0
    if SQUARES > 0:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
        value *= factor
    if ROWS > R:
        value = _activation(value, ACT) * (tl.sum(_stacked(second, P, S), 0) * factor)
    p = tl.arange(0, P)
    m = p // R
    row = row0 + p % R
    inside = (m < M) & (row < N)
    if BIAS:
        value += tl.load(bias + row, mask=inside, other=0)
    if RES:
        value += tl.load(residual + m.to(tl.int64) * residual_stride + row, mask=inside, other=0)
    tl.store(out + m.to(tl.int64) * out_stride + row, value, mask=inside)


@triton.jit
def _some_rows(
    one, other, xq, xd, xs, squares, eps, residual, bias, out, program, N,
    residual_stride, out_stride,
    SQUARES, SP, K, M, W, R, P, AHEAD, ROWS, ACT, RES, BIAS, FORM, PDL, EMU,
):  # fmt: skip
    """R rows of a weight (ROWS: and as many of another) by M rows of activations."""
    SUBS: tl.constexpr = K // 32
    S: tl.constexpr = 32 * W
    STEPS: tl.constexpr = (SUBS + S - 1) // S
    PARTS: tl.constexpr = FORM[6] * ROWS
    UNEVEN: tl.constexpr = SUBS % S != 0
    # Steps beyond the last are asked for where a loop runs ahead, and must find nothing.
    MASKED: tl.constexpr = UNEVEN or STEPS > AHEAD
    row0 = program * R
    parts = ()
    for step in tl.static_range(AHEAD):
        parts = parts + _load_rows(one, other, row0, N, step, SUBS, S, MASKED, R, ROWS, FORM)
    await_inputs(PDL)
    sizes = 0.0
    if SQUARES > 0:
        # Asked for now, needed at the end: SQUARES of each row, or SP, the power of 2 above.
        part, m = tl.arange(0, SP)[:, None], tl.arange(0, P)[None, :] // R
        sizes = tl.load(squares + m * SQUARES + part, mask=(part < SQUARES) & (m < M), other=0)
    sums = ()
    for _ in tl.static_range(M * ROWS):
        sums = sums + (tl.zeros([S], tl.float32),)
    if STEPS <= AHEAD:
        for step in tl.static_range(STEPS):
            now = parts[step * PARTS : (step + 1) * PARTS]
            sums = _step(now, sums, xq, xd, xs, step, SUBS, S, M, ROWS, UNEVEN, FORM, EMU)
    else:
        for step in range(STEPS):
            following = _load_rows(
                one, other, row0, N, step + AHEAD, SUBS, S, MASKED, R, ROWS, FORM
            )
            now = parts[:PARTS]
            sums = _step(now, sums, xq, xd, xs, step, SUBS, S, M, ROWS, UNEVEN, FORM, EMU)
            parts = parts[PARTS:] + following
    _finish(
        *(sums, sizes, eps, residual, bias, out, row0, N, residual_stride, out_stride),
        *(K, M, R, P, S, ROWS, ACT, RES, BIAS, SQUARES),
    )


@triton.jit
def _few_rows(
    codes, upper, scales, supers, codes_2, upper_2, scales_2, supers_2,
    xq, xd, xs, squares, eps, residual, bias, out, N, N_2, residual_stride, out_stride,
    SQUARES: tl.constexpr, SP: tl.constexpr, K: tl.constexpr, M: tl.constexpr, W: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, AHEAD: tl.constexpr,
    ROWS: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr, BIAS: tl.constexpr,
    FORM: tl.constexpr, FORM_2: tl.constexpr, BESIDE: tl.constexpr, PDL: tl.constexpr,
    EMU: tl.constexpr,
):  # fmt: skip
    """A weight by some rows; with one that is its gate's up, or BESIDE one of another form."""
    depend(PDL)
    program = tl.program_id(0)
    one = (codes, upper, scales, supers)
    other = (codes_2, upper_2, scales_2, supers_2)
    if BESIDE:
        first = (N + R - 1) // R
        if program < first:
            _some_rows(
                one, one, xq, xd, xs, squares, eps, residual, bias, out, program, N,
                residual_stride, out_stride,
                SQUARES, SP, K, M, W, R, P, AHEAD, ROWS, ACT, RES, BIAS, FORM, PDL, EMU,
            )  # fmt: skip
        else:
            _some_rows(
                other, other, xq, xd, xs, squares, eps, residual, bias, out + N, program - first,
                N_2, residual_stride, out_stride,
                SQUARES, SP, K, M, W, R, P, AHEAD, ROWS, ACT, RES, BIAS, FORM_2, PDL, EMU,
            )  # fmt: skip
    else:
        _some_rows(
            one, other, xq, xd, xs, squares, eps, residual, bias, out, program, N,
            residual_stride, out_stride,
            SQUARES, SP, K, M, W, R, P, AHEAD, ROWS, ACT, RES, BIAS, FORM, PDL, EMU,
        )  # fmt: skip


@triton.jit
def _load_float_rows(values, values_up, row0, N, step, K, S, R, ROWS):
    c = step * S + tl.arange(0, S)
    weights = ()
    for r in tl.static_range(ROWS):
        row = tl.minimum(row0 + r % R, N - 1).to(tl.int64)
        if r < R:
            weights = weights + (tl.load(values + row * K + c, mask=c < K, other=0),)
        else:
            weights = weights + (tl.load(values_up + row * K + c, mask=c < K, other=0),)
    return weights


@triton.jit
def _few_rows_float(
    values,
    values_up,
    x,
    residual,
    bias,
    out,
    N,
    x_stride,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    ACT: tl.constexpr,
    RES: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same for weights that are floats."""
    S: tl.constexpr = 128 * W
    depend(PDL)
    row0 = tl.program_id(0) * R
    weights = _load_float_rows(values, values_up, row0, N, 0, K, S, R, ROWS)
    await_inputs(PDL)
    sums = ()
    for _ in tl.static_range(M * ROWS):
        sums = sums + (tl.zeros([S], tl.float32),)
    for step in range((K + S - 1) // S):
        following = _load_float_rows(values, values_up, row0, N, step + 1, K, S, R, ROWS)
        c = step * S + tl.arange(0, S)
        after = ()
        for m in tl.static_range(M):
            xm = tl.load(x + m * x_stride + c, mask=c < K, other=0).to(tl.float32)
            for r in tl.static_range(ROWS):
                after = after + (sums[m * ROWS + r] + weights[r].to(tl.float32) * xm,)
        sums = after
        weights = following
    _finish(
        *(sums, 0.0, 0.0, residual, bias, out, row0, N, residual_stride, out_stride),
        *(K, M, R, P, S, ROWS, ACT, RES, BIAS, 0),
    )


def default_config(weight: DeviceWeight, rows: int) -> Config:
    """Warps and rows of the weight of a program, where nothing was timed."""
    # What was fastest on an H200 in a step of an 8B model, the next kernel launched ahead.
    if rows > 1 or weight.columns < 2048:
        return 1, 2
    if weight.columns >= 8192:
        return 4, 2
    if weight.rows >= 12288:
        return 4, 4 if weight.layout is not None and weight.layout.bits <= 4 else 2
    if weight.rows > 4096:
        return (4, 2) if weight.rows > 5120 else (2, 4)
    return 1, 2


def configs(weight: DeviceWeight, rows: int) -> list[Config]:
    """What is worth timing for a weight and a number of rows of activations."""
    subs = weight.columns // 32
    # Threads without work are worth nothing, nor are more sums than registers hold.
    warps = [w for w in ((1, 2, 4, 8) if rows == 1 else (1, 2, 4)) if w == 1 or 16 * w <= subs]
    owned = (1, 2, 4, 8) if rows == 1 else (2, 4)
    return [(w, r) for w in warps for r in owned if r * rows <= 64]


def few_rows(
    weight: DeviceWeight,
    x: QuantisedRows | Tensor,
    out: Tensor,
    *,
    up: DeviceWeight | None = None,
    beside: DeviceWeight | None = None,
    activation: str = "silu",
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    out_offset: int = 0,
    pdl: bool = False,
    config: Config | None = None,
) -> None:
    """`out = x @ weight.T`, or `activation(x @ weight.T) * (x @ up.T)`, of 1 to 16 rows.

    Args:
        weight: [outputs, columns].
        x: quantised rows; float32 or float16 [rows, columns] where the weight is floats.
        out: float32 [rows, at least out_offset + outputs]; written from column out_offset on.
        up: of the same form and shape as `weight`.
        beside: another weight for the same rows, packed in any form, whose results follow; not with
            `up`, `bias` or `residual`.
        activation: `"silu"` or `"gelu_tanh"`; meaningful with `up`.
        residual: float32 [rows, outputs], added; may be what is written.
        bias: float32 [outputs], added.
        squares: where `x` is of `half_norm`, what that left beside it: the norm is completed.
        eps: of that norm.
        out_offset: see `out`.
        pdl: whether the kernel may start before the one ahead of it has ended. That one must then
            be of this package too.
        config: one of `configs`.

    Raises:
        ValueError: the shapes do not fit.
    """
    rows = len(x) if isinstance(x, Tensor) else len(x[1])
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"1 to {MOST_ROWS} rows, not {rows}")
    if up is not None and (up.form, up.rows, up.columns) != (
        *(weight.form, weight.rows, weight.columns),
    ):
        raise ValueError(f"gate is {weight.form} of {weight.rows} rows, up {up.form} of {up.rows}")
    if beside is not None and (
        any(each is not None for each in (up, bias, residual)) or beside.columns != weight.columns
    ):
        raise ValueError(f"beside: {beside.form} of {beside.columns} columns, and others")
    outputs = weight.rows + (0 if beside is None else beside.rows)
    if out.shape[1] < out_offset + outputs or len(out) < rows or out.stride(1) != 1:
        raise ValueError(f"results [{rows}, {outputs}] do not fit in {list(out.shape)}")
    warps, owned = config or default_config(weight, rows)
    if config is None and up is not None and rows == 1:
        warps, owned = 2, 4
    target = out[:, out_offset:]
    traits: dict[str, Any] = {
        "K": weight.columns,
        "M": rows,
        "W": warps,
        "R": owned,
        "P": triton.next_power_of_2(rows * owned),
        "ROWS": owned if up is None else 2 * owned,
        "ACT": activation == "gelu_tanh",
        "RES": residual is not None,
        "BIAS": bias is not None,
        "PDL": pdl,
        "num_warps": warps,
    }
    if pdl:
        traits["launch_pdl"] = True
    residual_stride = 0 if residual is None else residual.stride(0)
    last = (target if residual is None else residual, target if bias is None else bias, target)
    grid = (triton.cdiv(weight.rows, owned),)
    if isinstance(x, Tensor):
        values = weight.planes["values"]
        _few_rows_float[grid](
            *(values, values if up is None else up.planes["values"], x, *last),
            *(weight.rows, x.stride(0), residual_stride, out.stride(0)),
            **traits,
        )
        return
    form, parts = form_of(weight), half_norm_parts(weight.columns)
    second = form_of(up or beside or weight)
    if beside is not None:
        grid = (grid[0] + triton.cdiv(beside.rows, owned),)
    steps = triton.cdiv(weight.columns // 32, 32 * warps)
    ahead = steps if steps * traits["ROWS"] <= _IN_FLIGHT else 2
    if rows > 1:
        ahead = 1
    _few_rows[grid](
        *(*form.planes, *second.planes, *x, x[1] if squares is None else squares, eps, *last),
        *(weight.rows, beside.rows if beside is not None else 0),
        *(residual_stride, out.stride(0)),
        SQUARES=0 if squares is None else parts,
        SP=triton.next_power_of_2(parts),
        AHEAD=ahead,
        FORM=form.traits,
        FORM_2=second.traits,
        BESIDE=beside is not None,
        EMU=EMULATED,
        **traits,
    )
