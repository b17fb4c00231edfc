"""PTX texts with the results that the ISA prescribes, to run in the emulator or on a GPU.

A `Program` is one kernel. A *family* is a program of many instructions with the same kinds of operands: every
thread reads one tuple of operands, every instruction stores its results to its own row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from string import Template

import numpy as np
import softfloat

from numbaflash import emulator

SIZES = {f"{kind}{bits}": bits // 8 for kind in "bsu" for bits in (8, 16, 32, 64)}
SIZES |= {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f16x2": 4, "bf16x2": 4, "s16x2": 4, "u16x2": 4}
ANY_NAN = "any NaN"

HEADER = """.version 8.7
.target {arch}
.address_size 64
{before}
.visible .entry k({parameters})
{{
    .reg .b16 %h<40>; .reg .b32 %r<60>; .reg .b64 %rd<40>; .reg .f32 %f<40>; .reg .f64 %fd<20>;
    .reg .pred %p<20>;
"""


def kernel(body, arguments, arch="sm_80", before=""):
    """A module with the entry k: its pointers are in %rd1, %rd2, ..., the thread's number in %r0."""
    parameters = ", ".join(f".param .u64 a{n}" for n in range(arguments))
    lines = [HEADER.format(arch=arch, parameters=parameters, before=before)]
    lines += [f"    ld.param.u64 %rd{n + 1}, [a{n}];\n" for n in range(arguments)]
    lines += ["    mov.u32 %r0, %tid.x;\n", body, "\n    ret;\n}\n"]
    return "".join(lines)


@dataclass(eq=False)
class Program:
    """A kernel and what it must do.

    Attributes
    ----------
    name : str
    text : str
    section : str
        Title of the section of the PTX ISA that says what is expected here.
    covers : tuple of str
        The opcodes under test; each occurs in the text.
    arguments : callable
        Makes the arrays to launch with.
    check : callable
        Takes the arrays after the launch and asserts.
    exact : bool
        The ISA leaves no choice: a GPU's results have the very bits of the emulator's.
    on_gpu : bool
        False for kernels that would end the process's context.
    """

    name: str
    text: str
    section: str
    covers: tuple
    arguments: Callable
    check: Callable
    threads: int = 32
    blocks: int = 1
    shared_bytes: int = 0
    arch: str = "sm_80"
    exact: bool = True
    on_gpu: bool = True

    def emulate(self, **options):
        arrays = self.arguments()
        with np.errstate(all="ignore"):
            emulator.launch(
                self.text, self.blocks, self.threads, *arrays, shared_bytes=self.shared_bytes, **options
            )
        return arrays


def program(name, body, section, covers, inputs, expected, *, before="", arch="sm_80", **options):
    """A program whose kernel takes ``inputs`` and one output per array of ``expected`` (bit for bit)."""
    inputs, expected = [np.asarray(x) for x in inputs], [np.asarray(x) for x in expected]
    text = kernel(body, len(inputs) + len(expected), arch, before)

    def arguments():
        return [x.copy() for x in inputs] + [np.zeros_like(x) for x in expected]

    def check(arrays):
        for n, (got, want) in enumerate(zip(arrays[len(inputs) :], expected)):
            np.testing.assert_array_equal(
                got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"), f"{name}, output {n}"
            )

    covers = (covers,) if isinstance(covers, str) else tuple(covers)
    return Program(name, text, section, covers, arguments, check, arch=arch, **options)


# --- families -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Near:
    """An approximate result: within ``relative * |value| + absolute`` of a real number."""

    value: float
    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True)
class Instruction:
    """One row of a family.

    ``model`` takes operands as ints (signed where the type is; bits for floats) and gives the bits of the
    result, ANY_NAN, a `Near`, None where the ISA leaves the result open, or two of these for packed halves.
    ``code``: PTX with $d, $a, $b, $c, $e.
    """

    opcode: str
    model: Callable
    out: str = ""
    code: str = ""
    covers: tuple = ()
    arch: str = ""

    @property
    def result(self):
        return self.out or self.opcode.split(".")[-1]

    def agrees(self, bits, expected):
        form = softfloat.FORMATS.get(self.result)
        if expected is None:
            return True
        if isinstance(expected, tuple):  # a pair: low half, high half
            half = Instruction(self.opcode, self.model, self.result[:-2])
            return half.agrees(bits & 0xFFFF, expected[0]) and half.agrees(bits >> 16, expected[1])
        if expected is ANY_NAN:
            return softfloat.is_nan(bits, form)
        if isinstance(expected, Near):
            if softfloat.is_nan(bits, form) or softfloat.is_inf(bits, form):
                return False
            error = abs(float(softfloat.value(bits, form)) - expected.value)
            return error <= expected.relative * abs(expected.value) + expected.absolute
        return bits == expected & ((1 << 8 * SIZES[self.result]) - 1)


REGISTERS = {1: "%h", 2: "%h", 4: "%r", 8: "%rd"}
WIDTHS = {1: "u8", 2: "b16", 4: "b32", 8: "b64"}


def operand_samples(kind):
    """Bit patterns of a type that are worth trying."""
    if kind in softfloat.FORMATS:
        return softfloat.samples(softfloat.FORMATS[kind])
    if kind in ("f16x2", "bf16x2"):
        halves = softfloat.samples(softfloat.FORMATS[kind[:-2]])
        return [low | high << 16 for low, high in zip(halves, halves[5:] + halves[:5])]
    bits = 8 * SIZES[kind]
    top = 1 << bits
    values = [
        0,
        1,
        2,
        7,
        bits // 2,
        bits - 1,
        bits,
        top // 2,
        top // 2 - 1,
        top // 2 + 1,
        top - 1,
        top - 2,
        top // 3,
        2 * top // 3,
        0x9E3779B97F4A7C15,
        0xF0,
    ]
    return [v % top for v in values]


def signed(bits, kind):
    """A pattern as the int that the type means."""
    width = 8 * SIZES[kind]
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


@dataclass(eq=False)
class Family:
    """Instructions over the same operand types; ``operands``: rows of bit patterns besides the usual."""

    name: str
    section: str
    kinds: tuple
    instructions: list
    arch: str = "sm_80"
    operands: list = field(default_factory=list)
    samples: dict = field(default_factory=dict)  # position -> patterns instead of the usual

    def rows(self, count=448):
        """Operand tuples: all pairs of the first two, and mixtures."""
        rng = np.random.default_rng(len(self.name))
        usual = [self.samples.get(n) or operand_samples(kind) for n, kind in enumerate(self.kinds)]
        rows = list(self.operands)
        if len(self.kinds) == 1:
            rows += [(x,) for x in usual[0]]
        else:
            pairs = [(x, y) for x in usual[0] for y in usual[1]]
            picks = rng.permutation(len(pairs))[: count - len(rows) - 64]
            rows += [(*pairs[p], *(u[rng.integers(len(u))] for u in usual[2:])) for p in picks]
        for _ in range(64):
            rows.append(
                tuple(
                    usual[n][rng.integers(len(usual[n]))]
                    if n in self.samples or rng.random() < 0.3
                    else int.from_bytes(rng.bytes(SIZES[kind]), "little")
                    for n, kind in enumerate(self.kinds)
                )
            )
        return rows + rows[: -len(rows) % 32]

    @functools.cached_property
    def text(self):
        body = ["    mul.wide.u32 %rd20, %r0, 8;\n"]
        letters = {}
        for n, kind in enumerate(self.kinds):
            size = SIZES[kind]
            letter = "abce"[n]
            letters[letter] = f"{REGISTERS[size]}{10 + n}"
            body.append(
                f"    add.u64 %rd21, %rd{n + 1}, %rd20;\n"
                f"    ld.global.{WIDTHS[size]} {letters[letter]}, [%rd21];\n"
            )
        body.append(f"    ld.param.u64 %rd21, [a{len(self.kinds)}];\n    add.u64 %rd21, %rd21, %rd20;\n")
        for number, instruction in enumerate(self.instructions):
            size = SIZES[instruction.result]
            d = f"{REGISTERS[size]}5"
            code = instruction.code
            if not code:
                arity = instruction.model.__code__.co_argcount - len(instruction.model.__defaults__ or ())
                code = f"{instruction.opcode} $d, " + ", ".join(f"${x}" for x in "abce"[:arity]) + ";"
            code = Template(code).substitute(letters, d=d)
            body.append(
                f"    {code}\n    st.global.{WIDTHS[size]} [%rd21 + {number * 8 * self.threads}], {d};\n"
            )
        return kernel("".join(body), len(self.kinds) + 1, self.arch)

    threads = 512

    def launch_on(self, run, rows):
        """Results per instruction (bit patterns) of operand ``rows``; ``run(program)`` gives the arrays."""
        arrays = []
        for n in range(len(self.kinds)):
            column = np.zeros(self.threads, np.uint64)
            column[: len(rows)] = [row[n] for row in rows]
            column[len(rows) :] = rows[0][n]
            arrays.append(column)
        arrays.append(np.zeros((len(self.instructions), self.threads), np.uint64))
        covers = tuple(c for i in self.instructions for c in (i.covers or (i.opcode,)))
        made = Program(
            self.name,
            self.text,
            self.section,
            covers,
            lambda: arrays,
            lambda arrays: None,
            threads=len(rows),
            arch=self.arch,
        )
        results = run(made)[-1]
        return {i.opcode: [int(v) for v in results[n, : len(rows)]] for n, i in enumerate(self.instructions)}

    def verify(self, instruction, rows, results):
        """Assert that an instruction's results are those of its model."""
        kinds = self.kinds
        count = instruction.model.__code__.co_argcount - len(instruction.model.__defaults__ or ())
        mask = (1 << 8 * SIZES[instruction.result]) - 1
        wrong = []
        for row, bits in zip(rows, results):
            expected = instruction.model(*(signed(x, kind) for x, kind in zip(row[:count], kinds)))
            if not instruction.agrees(bits & mask, expected):
                shown = expected if not isinstance(expected, int) else hex(expected & mask)
                wrong.append(f"({', '.join(map(hex, row[:count]))}): {bits & mask:#x}, not {shown}")
        assert not wrong, f"{instruction.opcode}, {len(wrong)} of {len(rows)}:\n" + "\n".join(wrong[:8])

    def compare(self, instruction, rows, gpu, emulated):
        """Assert that a GPU and the emulator agree in every bit that the ISA determines."""
        count = instruction.model.__code__.co_argcount - len(instruction.model.__defaults__ or ())
        for row, one, other in zip(rows, gpu, emulated):
            expected = instruction.model(*(signed(x, kind) for x, kind in zip(row[:count], self.kinds)))
            if isinstance(expected, int):
                assert one == other, (
                    f"{instruction.opcode}({', '.join(map(hex, row[:count]))}): {one:#x}, {other:#x}"
                )


@functools.cache
def family_results(family):
    """What the emulator gives for the family's own rows."""
    rows = family.rows()
    return rows, family.launch_on(Program.emulate, rows)
