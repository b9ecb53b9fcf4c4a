"""Products with fp8 weights whose codes never touch shared memory: from global memory straight into the registers that
the tensor cores read.

A weight is read once, so a stay in shared memory only costs: stores, loads, barriers. The tensor cores take their left
operand from registers, and which input is the first of a product is nobody's business as long as both operands agree.
So a thread loads 16 neighbouring codes of a row and hands them out, four at a time, to four products of 16 inputs:

    a warp's step: 16 outputs x 128 inputs              lane 4 g + q holds, of rows g and g + 8,
                                                        codes 16 q .. 16 q + 15 and 64 + 16 q .. 64 + 16 q + 15
    row g      |q 0 |q 1 |q 2 |q 3 |q 0 |q 1 |q 2 |q 3 |
    row g + 8  |q 0 |q 1 |q 2 |q 3 |q 0 |q 1 |q 2 |q 3 |
                        product i of each half takes words i of its four lanes: 4 x 4 codes

A program's slice of x lies in shared memory, copied once; behind one barrier its warps run on their own, `AHEAD` steps
of codes ahead of the products. Products are a warp's (m16n8k16; a thread reads 16 neighbouring values of a token, as
it does codes of a row) or, WIDE, those of four warps, which are faster for many tokens but read x from shared memory
themselves: there it lies in the order of the products. A program may do several tiles of outputs, one after another
(`TURNS`), and is ahead of itself across their borders too. Nothing is unrolled further than AHEAD steps: instructions
are read from memory as well, and straight code of a whole slice would be read cold.

Codes become bf16 as in `products`: their bits moved to where bf16 keeps them are the value times 2^-120, one packed
product brings in the scale of the tile of 32 x 32, 2^16 comes back in the sums.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openv41.ops.kernels import bits

STEP = gl.constexpr(128)
"""Inputs a step: a whole line of memory of each row."""
WORDS = gl.constexpr(32)
"""Words of four codes in a step."""
PIECE_WORDS = gl.constexpr(4)
"""Words that a thread loads at a time."""
X_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""16 bytes at a time, exchanged by the token: eight lanes' reads of two tokens fall into different banks."""

PERMUTED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
"""Where a warpgroup's product reads x: inputs lie in the order of the products."""
PERMUTED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
"""The same, seen as words of two inputs."""

FOUR_CODES = gl.constexpr(
    """{
    .reg .b32 low, high, sign;
    prmt.b32 low, $4, 0, 0x4140;
    prmt.b32 high, $4, 0, 0x4342;
    and.b32 sign, low, 0x00800080;
    mul.lo.u32 low, low, 16;
    mad.lo.u32 low, sign, 240, low;
    mul.rn.bf16x2 low, low, $5;
    and.b32 sign, high, 0x00800080;
    mul.lo.u32 high, high, 16;
    mad.lo.u32 high, sign, 240, high;
    mul.rn.bf16x2 high, high, $5;
    mov.b32 {$0, $1}, low;
    mov.b32 {$2, $3}, high;
    }"""
)
"""A word of four codes to four bf16. Two to a register; sixteen times a code puts its magnitude into place and its sign
from bit 7 to bit 11, and 240 times the sign adds what is missing to bit 15. Half of it is arithmetic rather than logic,
which another part of the machine does: logic alone would be half as fast."""


@gluon.constexpr_function
def powers(count):
    """1, 2, 4, .. below `count`."""
    return [1 << i for i in range(count.bit_length() - 1)]


@gluon.constexpr_function
def sums_layout(WARPS, BN, WIDE):
    return gl.NVMMADistributedLayout([3 if WIDE else 2, 0], [WARPS, 1], [16, BN, 16] if WIDE else [16, 8])


@gluon.constexpr_function
def words_layout(WARPS, ROUNDS):
    """Of a step's words [rows, 32]: four neighbours a thread, where the products want their codes."""
    registers = [[0, 1], [0, 2], [8, 0], [0, 16]] + [[16 * WARPS * i, 0] for i in powers(ROUNDS)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warps = [[16 * i, 0] for i in powers(WARPS)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16 * WARPS * ROUNDS, 32])


@gluon.constexpr_function
def scales_layout(WARPS, ROUNDS):
    """Of their scales [rows / 16, 8]: `words_layout`, as [rows / 16, 16, 8, 4], less what one scale is shared by."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 8, 0, 0], [0, 0, 4, 0]]
    registers += [[WARPS * i, 0, 0, 0] for i in powers(ROUNDS)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    warps = [[i, 0, 0, 0] for i in powers(WARPS)]
    words = gl.DistributedLinearLayout(registers, lanes, warps, [], [WARPS * ROUNDS, 16, 8, 4])
    return gl.SliceLayout(1, gl.SliceLayout(3, words))


@gluon.constexpr_function
def values_layout(BN, WARPS):
    """Of a step's x [BN, 128]: what `words_layout` is for weights; all warps have the same."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 64]] + [[8 * i, 0] for i in powers(BN // 8)]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0] for _ in powers(WARPS)], [], [BN, 128])


@gluon.constexpr_function
def across(width):
    """Lanes of a warp side by side along `width` values, eight of them each."""
    return min(32, width // 8)


@gluon.constexpr_function
def rows_layout(PAIRED, WIDTH, WARPS):
    """Of results [tokens, WIDTH]: eight neighbours a thread. PAIRED: of the first or second of each two."""
    lanes = across(WIDTH)
    return gl.BlockedLayout([1, 4 if PAIRED else 8], [32 // lanes, lanes], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def blocks_layout(WIDTH, WARPS):
    """Of pairs' halves [tokens, WIDTH / 32, 16]: distributed as in `rows_layout`."""
    lanes = across(WIDTH)
    return gl.BlockedLayout([1, 1, 4], [32 // lanes, lanes // 4, 4], [WARPS, 1, 1], [2, 1, 0])


@gluon.jit
def factor_of(code):
    """2^(code - 127 + 120 - 16) as bf16, twice in a register: see `products.factor_of`."""
    factor = gl.minimum(code.to(gl.int32) + 104, 255) << 7
    return factor | (factor << 16)


@gluon.jit
def load_words(weight, column, place, last):
    """A step's words from inputs `place` on, nothing from `last` on: pointers to its first ones, their columns."""
    words = (last - place) // 4
    inside = column // PIECE_WORDS < words // PIECE_WORDS  # all or none of a thread's
    return gl.load(weight + place // 4, mask=inside[None, :], other=0)


@gluon.jit
def load_scales(scale, unit, place, last):
    """The same of the scales, which are a thirty-second as many. `unit`: numbers of 16 inputs."""
    return gl.load(scale + place // 32, mask=(unit < (last - place) // 16)[None, :], other=0)


@gluon.jit
def first_steps(of_words, column, of_scales, unit, first, last, AHEAD: gl.constexpr):
    """Words and scales of the first AHEAD steps."""
    words = ()
    scales = ()
    for step in gl.static_range(AHEAD):
        words = words + (load_words(of_words, column, first + step * STEP, last),)
        scales = scales + (load_scales(of_scales, unit, first + step * STEP, last),)
    return words, scales


@gluon.jit
def load_ahead(
    of_words, column, of_scales, unit, coming, turn, first, last,
    INPUTS: gl.constexpr, STEPS: gl.constexpr, TURNS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Words and scales of step `coming` of a turn; from STEPS on they are the next turn's, if there is one."""
    further = coming >= STEPS
    place = first + (coming - gl.where(further, STEPS, 0)) * STEP
    row = gl.cast(turn + gl.where(further, 1, 0), gl.int64) * ROWS
    end = gl.where(row < TURNS * ROWS, last, first)
    words = load_words(of_words + row * (INPUTS // 4), column, place, end)
    return words, load_scales(of_scales + row // 32 * (INPUTS // 32), unit, place, end)


@gluon.jit
def weights_of(words, scales, LAYOUT: gl.constexpr, OPERAND: gl.constexpr, ROWS: gl.constexpr):
    """bf16 weights [ROWS, STEP] times 2^-16 of words [ROWS, WORDS] and the codes of their scales [ROWS / 16, 8]."""
    factor = factor_of(scales)[:, None, :][:, :, :, None].broadcast_to([ROWS // 16, 16, 8, PIECE_WORDS])
    factor = gl.convert_layout(gl.reshape(factor, [ROWS, WORDS]), LAYOUT, assert_trivial=True)
    a, b, c, d = gl.inline_asm_elementwise(
        FOUR_CODES, "=h,=h,=h,=h,r,r", [words, factor], dtype=(gl.bfloat16,) * 4, is_pure=True, pack=1
    )
    values = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [ROWS, 2, 4, 4, 2, 2])
    values = gl.reshape(values.permute((0, 1, 3, 4, 2, 5)), [ROWS, STEP])
    return gl.convert_layout(values, OPERAND, assert_trivial=True)


@gluon.jit
def values_of(x, OPERAND: gl.constexpr, BN: gl.constexpr):
    """The right operand [STEP, BN] of a step's x [BN, STEP] in shared memory, inputs in the same order."""
    values = gl.reshape(x.load(values_layout(BN, gl.num_warps())), [BN, 2, 4, 4, 2, 2])
    values = gl.reshape(values.permute((0, 1, 3, 4, 2, 5)), [BN, STEP])
    return gl.convert_layout(values.permute((1, 0)), OPERAND, assert_trivial=True)


@gluon.jit
def copy_x(x, x_stride, token, count, first, last, shared, begin, steps, BN: gl.constexpr, WARPS: gl.constexpr):
    """`steps` steps from step `begin` on of tokens' inputs, which are those from `first` to `last`, into shared memory
    [STEPS, BN, STEP], zeros where there are none."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    tokens = token + gl.arange(0, BN, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, LAYOUT))
    source = x + tokens.to(gl.int64)[:, None] * x_stride + column[None, :]
    for turn in range(steps):
        step = begin + (turn + gl.program_id(1)) % steps  # not all programs at the same lines of L2 at once
        place = first + step * STEP
        inside = (column // 16 < (last - place) // 16)[None, :] & (tokens < count)[:, None]
        async_copy.async_copy_global_to_shared(shared.index(step), source + place, mask=inside)
    async_copy.commit_group()


@gluon.jit
def copy_permuted_x(
    x, x_stride, token, count, first, last, shared, begin, steps, BN: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """The same for warpgroups' products, [STEPS, BN, STEP / 2] words of two inputs: place (half, product, upper, lane,
    pair) of a step holds input (half, lane, product, upper, pair). Four bytes at a time, but no register waits."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    tokens = token + gl.arange(0, BN, layout=gl.SliceLayout(1, LAYOUT))
    slot = gl.arange(0, STEP // 2, layout=gl.SliceLayout(0, LAYOUT))
    word = (slot & 32) + (slot & 3) * 8 + ((slot >> 2) & 7)
    x = x.to(gl.pointer_type(gl.int32), bitcast=True)
    source = x + tokens.to(gl.int64)[:, None] * (x_stride // 2) + word[None, :]
    for turn in range(steps):
        step = begin + (turn + gl.program_id(1)) % steps
        place = first + step * STEP
        inside = (word < (last - place) // 2)[None, :] & (tokens < count)[:, None]
        async_copy.async_copy_global_to_shared(shared.index(step), source + place // 2, mask=inside)
    async_copy.commit_group()


@gluon.jit
def words_at(weight, row, outputs, INPUTS: gl.constexpr, LAYOUT: gl.constexpr, ROWS: gl.constexpr):
    """Pointers to the first step's words of ROWS rows, and the words' columns."""
    rows = gl.minimum(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), outputs - 1)
    column = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LAYOUT))
    weight = weight.to(gl.pointer_type(gl.int32), bitcast=True)
    return weight + rows.to(gl.int64)[:, None] * (INPUTS // 4) + column[None, :], column


@gluon.jit
def scales_at(scale, row, outputs, INPUTS: gl.constexpr, LAYOUT: gl.constexpr, ROWS: gl.constexpr):
    """Pointers to the first step's scales of ROWS rows, one for 16 rows and 16 inputs, and the inputs' numbers."""
    sixteens = row // 16 + gl.arange(0, ROWS // 16, layout=gl.SliceLayout(1, LAYOUT))
    tile_rows = gl.minimum(sixteens // 2, (outputs - 1) // 32)
    unit = gl.arange(0, STEP // 16, layout=gl.SliceLayout(0, LAYOUT))
    return scale + tile_rows[:, None] * (INPUTS // 32) + (unit // 2)[None, :], unit


@gluon.jit
def allocate_x(STEPS: gl.constexpr, BN: gl.constexpr, WIDE: gl.constexpr):
    if WIDE:
        return gl.allocate_shared_memory(gl.int32, [STEPS, BN, STEP // 2], PERMUTED_WORDS)
    else:
        return gl.allocate_shared_memory(gl.bfloat16, [STEPS, BN, STEP], X_SHARED)


@gluon.constexpr_function
def phase_at(STEPS, AHEAD, phase, PHASES):
    """The step that a phase begins with: phases are whole turns of the loop."""
    return STEPS // AHEAD * phase // PHASES * AHEAD


@gluon.jit
def waited_for(total, values):
    """The sums when a warpgroup's products are done, and the registers of their left operand are free."""
    total, values = warpgroup_mma_wait(0, deps=[total, values])
    return total


@gluon.constexpr_function
def on_their_way(PIECES, each):
    """Pieces that are read at a time, a divisor of them all. `each`: values of one that a thread has in registers."""
    return max(
        some for some in range(1, PIECES + 1) if PIECES % some == 0 and some * each <= max(each, 64) and some <= 10
    )


@gluon.jit
def leave_sums(total, partials, tile, piece, PIECES: gl.constexpr, WARPS: gl.constexpr, ROUNDS: gl.constexpr,
               BN: gl.constexpr, WIDE: gl.constexpr):  # fmt: skip
    """This piece's sums into memory [tiles, PIECES, ROWS, BN]. Returns pointers to those of the tile's first piece."""
    ROWS: gl.constexpr = 16 * WARPS * ROUNDS
    LAYOUT: gl.constexpr = sums_layout(WARPS, BN, WIDE)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    place = row[:, None] * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    first = partials + gl.cast(tile * PIECES, gl.int64) * (ROWS * BN) + place
    gl.store(first + piece * (ROWS * BN), total)
    return first


@gluon.jit
def join_pieces(total, partials, counters, tile, piece, PIECES: gl.constexpr, WARPS: gl.constexpr, ROUNDS: gl.constexpr,
                BN: gl.constexpr, WIDE: gl.constexpr):  # fmt: skip
    """Leave this piece's sums in memory. The last program to come adds all pieces, in their order, so that the result
    does not depend on who came last; it gets them and True, the others False. Sets the counter back to 0."""
    ROWS: gl.constexpr = 16 * WARPS * ROUNDS
    TOGETHER: gl.constexpr = on_their_way(PIECES, ROUNDS * BN // 2)
    LAYOUT: gl.constexpr = sums_layout(WARPS, BN, WIDE)
    first = leave_sums(total, partials, tile, piece, PIECES, WARPS, ROUNDS, BN, WIDE)
    gl.thread_barrier()  # all threads have stored before one of them counts
    before = gl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
    is_last = before == PIECES - 1
    if is_last:
        total = gl.zeros([ROWS, BN], gl.float32, LAYOUT)
        for start in range(0, PIECES, TOGETHER):
            parts = ()
            for each in gl.static_range(TOGETHER):
                theirs = first + (start + each) * (ROWS * BN)
                parts = parts + (gl.load(theirs, cache_modifier=".cg"),)
            for each in gl.static_range(TOGETHER):
                total += parts[each]
        gl.atomic_xchg(counters + tile, 0, sem="relaxed", scope="gpu")
    return total, is_last


@gluon.jit
def finish(
    y, row, token, count, cos, sin, WIDTH: gl.constexpr, TURNED: gl.constexpr, FORM: gl.constexpr,
    ROWS: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Rows of heads WIDTH wide: y [BN, ROWS], bf16 values in float32, are outputs from `row` on. Their tails of TURNED
    pairs are turned, then blocks of 32 rounded to FORM."""
    HALF: gl.constexpr = ROWS // 2
    LAYOUT: gl.constexpr = rows_layout(True, ROWS, WARPS)
    a, b = gl.split(gl.reshape(y, [BN, HALF, 2]))
    a = gl.convert_layout(a, LAYOUT)
    b = gl.convert_layout(b, LAYOUT)
    if TURNED > 0:
        pair = row // 2 + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
        pair = pair % (WIDTH // 2) - (WIDTH // 2 - TURNED)
        tokens = gl.minimum(token + gl.arange(0, BN, layout=gl.SliceLayout(1, LAYOUT)), count - 1)
        angle = tokens[:, None] * TURNED + pair[None, :]
        in_tail = (pair >= 0)[None, :]
        c = gl.load(cos + angle, mask=in_tail, other=1.0)
        s = gl.load(sin + angle, mask=in_tail, other=0.0)
        real = (a * c - b * s).to(gl.bfloat16).to(gl.float32)
        imaginary = (a * s + b * c).to(gl.bfloat16).to(gl.float32)
        a, b = gl.where(in_tail, real, a), gl.where(in_tail, imaginary, b)
    if FORM != bits.NONE:
        BLOCKS: gl.constexpr = blocks_layout(ROWS, WARPS)
        size = gl.maximum(gl.abs(a), gl.abs(b))
        size = gl.convert_layout(gl.reshape(size, [BN, ROWS // 32, 16]), BLOCKS)
        scale = bits.scale_code(gl.max(size, 2), FORM)
        each = gl.reshape(scale[:, :, None].broadcast_to([BN, ROWS // 32, 16]), [BN, HALF])
        each = gl.convert_layout(each, LAYOUT)
        a = bits.code_value(bits.value_code(a, each, FORM), each, FORM)
        b = bits.code_value(bits.value_code(b, each, FORM), each, FORM)
    y = gl.reshape(gl.join(a, b), [BN, ROWS])
    return gl.convert_layout(y, rows_layout(False, ROWS, WARPS))


@gluon.jit
def write(
    total, out, row, token, count, outputs, out_stride, cos, sin,
    WIDTH: gl.constexpr, TURNED: gl.constexpr, FORM: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Finished sums [ROWS, BN] as results."""
    RESULT: gl.constexpr = rows_layout(False, ROWS, WARPS)
    y = gl.convert_layout((total * 65536.0).to(gl.bfloat16).permute((1, 0)), RESULT)
    if TURNED > 0 or FORM != bits.NONE:
        y = finish(y.to(gl.float32), row, token, count, cos, sin, WIDTH, TURNED, FORM, ROWS, BN, WARPS)
        y = y.to(gl.bfloat16)
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, RESULT))
    tokens = token + gl.arange(0, BN, layout=gl.SliceLayout(1, RESULT))
    place = tokens.to(gl.int64)[:, None] * out_stride + rows[None, :]
    gl.store(out + place, y, mask=(tokens < count)[:, None] & (rows < outputs)[None, :])


@gluon.jit
def deliver(
    total, out, partials, counters, cos, sin, tile, row, part, piece, count, outputs, out_stride,
    WIDTH: gl.constexpr, TURNED: gl.constexpr, FORM: gl.constexpr, PIECES: gl.constexpr,
    WARPS: gl.constexpr, ROUNDS: gl.constexpr, BN: gl.constexpr, WIDE: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Write a tile's results, or leave its sums to the last piece, or (APART) to another launch."""
    ROWS: gl.constexpr = 16 * WARPS * ROUNDS
    number = tile * gl.num_programs(0) + part
    if APART:
        leave_sums(total, partials, number, piece, PIECES, WARPS, ROUNDS, BN, WIDE)
    else:
        is_last = True
        if PIECES > 1:
            total, is_last = join_pieces(total, partials, counters, number, piece, PIECES, WARPS, ROUNDS, BN, WIDE)
        if is_last:
            write(
                total, out, row, part * BN, count, outputs, out_stride, cos, sin, WIDTH, TURNED, FORM, ROWS, BN, WARPS
            )  # fmt: skip


@gluon.jit(do_not_specialize=["count", "steps"])
def direct_kernel(
    x, weight, scale, out, partials, counters, cos, sin,
    count, outputs, x_stride, x_group, out_stride, weight_step, scale_step, steps,
    INPUTS: gl.constexpr, GROUP: gl.constexpr, SECOND: gl.constexpr,
    WIDTH: gl.constexpr, TURNED: gl.constexpr, FORM: gl.constexpr, PIECES: gl.constexpr,
    STEPS: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr, ROUNDS: gl.constexpr, BN: gl.constexpr,
    WIDE: gl.constexpr, TURNS: gl.constexpr, BURST: gl.constexpr, APART: gl.constexpr, PHASES: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """16 x WARPS x ROUNDS outputs of BN tokens a program, or a piece of their sums: STEPS steps of STEP inputs.
    GROUP > 0: each GROUP outputs read columns of x of their own, `x_group` apart. SECOND > 0: outputs from there on are
    those of a second weight, which lies `weight_step` bytes behind the first, its scale `scale_step`. The rest: see
    `finish`. Parts of the tokens are neighbours in the grid: they read the same weights at the same time."""
    ROWS: gl.constexpr = 16 * WARPS * ROUNDS
    part, tile, piece = gl.program_id(0), gl.program_id(1) * TURNS, gl.program_id(2)
    row, token = tile * ROWS, part * BN
    if GROUP > 0:
        x += (row // GROUP) * x_group
    weight_row, weight_rows = row, outputs
    if SECOND > 0:
        second = row >= SECOND
        weight += gl.where(second, weight_step, 0)
        scale += gl.where(second, scale_step, 0)
        weight_row -= gl.where(second, SECOND, 0)
        weight_rows = gl.where(second, outputs - SECOND, SECOND)
    if EARLY:
        gdc_launch_dependents()
    first = piece * (STEPS * STEP)
    last = gl.minimum(first + STEPS * STEP, INPUTS)

    SUMS: gl.constexpr = sums_layout(WARPS, BN, WIDE)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    CODES: gl.constexpr = words_layout(WARPS, ROUNDS)
    of_words, column = words_at(weight, weight_row, weight_rows, INPUTS, CODES, ROWS)
    of_scales, unit = scales_at(scale, weight_row, weight_rows, INPUTS, scales_layout(WARPS, ROUNDS), ROWS)
    words, scales = first_steps(of_words, column, of_scales, unit, first, last, AHEAD)
    shared = allocate_x(STEPS, BN, WIDE)
    if EARLY:
        gdc_wait()
    for phase in gl.static_range(PHASES):
        begin = steps // AHEAD * phase // PHASES * AHEAD  # as `phase_at`
        length = steps // AHEAD * (phase + 1) // PHASES * AHEAD - begin
        if WIDE:
            copy_permuted_x(x, x_stride, token, count, first, last, shared, begin, length, BN, WARPS)
        else:
            copy_x(x, x_stride, token, count, first, last, shared, begin, length, BN, WARPS)

    for turn in range(TURNS):
        total = gl.zeros([ROWS, BN], gl.float32, SUMS)
        for phase in gl.static_range(PHASES):
            async_copy.wait_group(PHASES - 1 - phase)
            if WIDE:
                fence_async_shared()  # copies write as threads do, products read as the copy engine does
            gl.thread_barrier()
            for start in range(phase_at(STEPS, AHEAD, phase, PHASES), phase_at(STEPS, AHEAD, phase + 1, PHASES), AHEAD):
                if BURST:  # all steps to come at once: neighbours in memory
                    words_after = ()
                    scales_after = ()
                    for step in gl.static_range(AHEAD):
                        more = load_ahead(
                            of_words, column, of_scales, unit, start + step + AHEAD, turn, first, last,
                            INPUTS, STEPS, TURNS, ROWS,
                        )  # fmt: skip
                        words_after = words_after + (more[0],)
                        scales_after = scales_after + (more[1],)
                for step in gl.static_range(AHEAD):
                    decoded = weights_of(words[step if BURST else 0], scales[step if BURST else 0], CODES, LEFT, ROWS)
                    if not BURST:
                        more = load_ahead(
                            of_words, column, of_scales, unit, start + step + AHEAD, turn, first, last,
                            INPUTS, STEPS, TURNS, ROWS,
                        )  # fmt: skip
                        words = words[1:] + (more[0],)
                        scales = scales[1:] + (more[1],)
                    here = shared.index(start + step)
                    if WIDE:  # the step before is multiplied while this one is decoded
                        if step > 0:
                            total = waited_for(total, values)  # type: ignore[has-type]
                        values = decoded
                        right = here._reinterpret(gl.bfloat16, [BN, STEP], PERMUTED).permute((1, 0))
                        total = warpgroup_mma(values, right, total, is_async=True)
                    else:
                        total = mma_v2(decoded, values_of(here, RIGHT, BN), total)
                if WIDE:
                    total = waited_for(total, values)
                if BURST:
                    words = words_after
                    scales = scales_after
        deliver(
            total, out, partials, counters, cos, sin, tile + turn, row + turn * ROWS, part, piece, count, outputs,
            out_stride, WIDTH, TURNED, FORM, PIECES, WARPS, ROUNDS, BN, WIDE, APART,
        )  # fmt: skip
