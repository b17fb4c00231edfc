"""Machine code as text, and the instructions of one pass of a kernel's main loop.

A kernel's main loop is the outermost one that holds matrix instructions.  Its *steady path* is what a warp
executes for a tile that is neither masked nor the last: of all ways through the body the one with the most
matrix instructions, then the most copies to shared memory (the next tile's), then the fewest instructions (no
masking).
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from typing import NamedTuple

from .report import UsageError

WHEELS = ("nvidia-cuda-nvdisasm", "nvidia-cuda-nvcc")
MATRIX, COPY = re.compile(r"[HIDBQO]MMA\b"), re.compile(r"LDGSTS\b")
FREE = re.compile(r"(EXIT|RET|BRX|JMX|JMP)\b")
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_TARGET = re.compile(r"(?:`\((\.L_\w+)\)|\b0x([0-9a-f]+))$")


class SassError(ValueError):
    """Machine code that this reading does not fit."""


class Instruction(NamedTuple):
    """One instruction: address, guard ("@!P0" or ""), opcode with its modifiers, operands."""

    address: int
    guard: str
    opcode: str
    operands: str = ""


class Block(NamedTuple):
    """A basic block: instructions ``first`` to ``last`` (exclusive), and the blocks that follow."""

    first: int
    last: int
    following: tuple[int, ...]


class Loop(NamedTuple):
    """A natural loop: its head, all its blocks, and those that jump back to the head."""

    head: int
    blocks: frozenset[int]
    tails: tuple[int, ...]


class Path(NamedTuple):
    """Instructions of one pass, each with how often it is executed."""

    instructions: tuple[tuple[Instruction, int], ...]

    def count(self, pattern: re.Pattern) -> int:
        """How many instructions have an opcode that matches."""
        return sum(times for one, times in self.instructions if pattern.match(one.opcode))


@cache
def find_nvdisasm() -> str:
    """Path of NVIDIA's disassembler: from its wheel, or on the search path.

    Raises
    ------
    UsageError
        Where there is none; says what to install.
    """
    for wheel in WHEELS:
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.stem == "nvdisasm" and file.locate().is_file():
                return str(file.locate())
    found = shutil.which("nvdisasm")
    if found is None:
        raise UsageError(
            f"reading machine code needs nvdisasm: pip install {WHEELS[0]}, or 'numbaflash[emulator]'"
        )
    return found


def disassemble(cubin: bytes) -> str:
    """Text of a cubin's code, as nvdisasm prints it.

    Raises
    ------
    UsageError
        If nvdisasm is not installed.
    SassError
        If it does not take the file.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([find_nvdisasm(), "-c", file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise SassError(f"nvdisasm: {done.stderr.strip()}")
    return done.stdout


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of a disassembly, and the labels: name -> number of the instruction behind it."""
    instructions, labels = [], {}
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(instructions)
            continue
        found = _LINE.search(line)
        if found:
            instructions.append(Instruction(int(found[1], 16), found[2] or "", found[3], found[4]))
    if not instructions:
        raise SassError("there are no instructions in this text")
    return instructions, labels


def blocks_of(instructions: list[Instruction], labels: dict[str, int]) -> list[Block]:
    """Basic blocks, in the order of the code; block 0 is the entry."""
    at = {one.address: number for number, one in enumerate(instructions)}
    leaders, targets = {0}, {}
    for number, one in enumerate(instructions):
        # the assembler also writes a jump that leaves a loop as a call to a label within the function
        if one.opcode.startswith("BRA") or (one.opcode.startswith("CALL") and "`(.L_" in one.operands):
            found = _TARGET.search(one.operands)
            if found is None:
                raise SassError(f"branch without a target: {one}")
            target = labels.get(found[1]) if found[1] else at.get(int(found[2], 16))
            if target is None:
                raise SassError(f"branch to nowhere: {one}")
            targets[number] = target
            leaders |= {target, number + 1}
        elif FREE.match(one.opcode):
            leaders.add(number + 1)
    starts = sorted(leader for leader in leaders if leader < len(instructions))
    number_of = {start: number for number, start in enumerate(starts)}
    found_blocks = []
    for number, first in enumerate(starts):
        last = starts[number + 1] if number + 1 < len(starts) else len(instructions)
        end = instructions[last - 1]
        following = []
        if last - 1 in targets:
            following.append(number_of[targets[last - 1]])
        conditional = bool(end.guard) or (last - 1 in targets and not _TARGET.match(end.operands))
        ends = last - 1 in targets or FREE.match(end.opcode)
        if last < len(instructions) and (conditional or not ends):
            following.append(number + 1)
        found_blocks.append(Block(first, last, tuple(dict.fromkeys(following))))
    return found_blocks


def loops_of(blocks: list[Block]) -> list[Loop]:
    """Natural loops, outer ones first."""
    before = [[] for _ in blocks]
    for number, block in enumerate(blocks):
        for follower in block.following:
            before[follower].append(number)
    dominators = _dominators(blocks, before)
    tails: dict[int, list[int]] = {}
    for number in dominators:
        for follower in blocks[number].following:
            if follower in dominators[number]:
                tails.setdefault(follower, []).append(number)
    loops = []
    for head, ends in tails.items():
        body, waiting = {head}, list(ends)
        while waiting:
            number = waiting.pop()
            if number not in body:
                body.add(number)
                waiting += [one for one in before[number] if one in dominators]
        loops.append(Loop(head, frozenset(body), tuple(ends)))
    return sorted(loops, key=lambda loop: -len(loop.blocks))


def _dominators(blocks: list[Block], before: list[list[int]]) -> dict[int, set[int]]:
    """For each block that the entry reaches, the blocks that every way to it goes through."""
    reached, waiting = set(), [0]
    while waiting:
        number = waiting.pop()
        if number not in reached:
            reached.add(number)
            waiting += blocks[number].following
    dominators = {number: set(reached) for number in reached}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for number in sorted(reached - {0}):
            common = set.intersection(*(dominators[one] for one in before[number] if one in reached)) | {
                number
            }
            if common != dominators[number]:
                dominators[number], changed = common, True
    return dominators


def tile_path(text: str, flops: Callable[[Instruction], int], expected: int) -> tuple[Path, int]:
    """The steady path of the main loop, and how many tiles one pass of it computes.

    Parameters
    ----------
    text : str
        From `disassemble`.
    flops : callable
        Operations of a matrix instruction, for a whole warp.
    expected : int
        Operations of a warp for one tile.  Loops within the main loop that hold matrix instructions are taken
        to run as often as it needs to get there.

    Raises
    ------
    SassError
        Where no whole number of tiles, or of passes of the inner loops, gives `expected`.
    """
    instructions, labels = parse(text)
    blocks = blocks_of(instructions, labels)
    loops = loops_of(blocks)

    def work(path: Path) -> int:
        return sum(times * flops(one) for one, times in path.instructions if MATRIX.match(one.opcode))

    def has_matrix(loop: Loop) -> bool:
        return any(
            MATRIX.match(instructions[n].opcode)
            for b in loop.blocks
            for n in range(blocks[b].first, blocks[b].last)
        )

    main = next((loop for loop in loops if has_matrix(loop)), None)
    if main is None:
        raise SassError("no loop holds matrix instructions")
    inner = [loop for loop in loops if loop.blocks < main.blocks]
    tops = [loop for loop in inner if not any(loop.blocks < other.blocks for other in inner)]
    once = _steady(instructions, blocks, main, tops, {loop.head: 1 for loop in tops})
    idle = _steady(instructions, blocks, main, tops, {loop.head: 0 for loop in tops})
    repeated = work(once) - work(idle)
    passes, rest = 1, 0
    if repeated:
        passes, rest = divmod(expected - work(idle), repeated)
    path = _steady(instructions, blocks, main, tops, {loop.head: passes for loop in tops})
    tiles, left = divmod(work(path), expected)
    if rest or left or tiles < 1 or passes < 1:
        raise SassError(
            f"a pass of the main loop makes {work(once)} operations per warp, {repeated} of them in inner "
            f"loops; {expected} per tile do not fit"
        )
    return path, tiles


def _steady(
    instructions: list[Instruction],
    blocks: list[Block],
    loop: Loop,
    inner: Iterable[Loop],
    passes: dict[int, int],
) -> Path:
    """The best way from a loop's head to a tail; inner loops are one step, taken `passes` times."""
    owner = {number: one for one in inner for number in one.blocks}
    best: dict[int, tuple] = {}

    def step(number: int) -> tuple[tuple[int, int, int], list, tuple[int, ...]]:
        """Value, instructions and followers of a block, or of the inner loop that starts with it."""
        if number in owner:
            one = owner[number]
            nested = [other for other in loops_of(blocks) if other.blocks < one.blocks]
            tops = [other for other in nested if not any(other.blocks < more.blocks for more in nested)]
            path = _steady(instructions, blocks, one, tops, {other.head: 1 for other in tops})
            listed = [(instruction, times * passes[one.head]) for instruction, times in path.instructions]
            leaving = [f for b in one.blocks for f in blocks[b].following if f not in one.blocks]
            return _value(listed), listed, tuple(dict.fromkeys(leaving))
        block = blocks[number]
        listed = [(instruction, 1) for instruction in instructions[block.first : block.last]]
        return _value(listed), listed, block.following

    def enter(number: int) -> tuple:
        """Best value and instructions from here to the end of the pass; None where no way leads there."""
        if number in best:
            return best[number]
        best[number] = None  # on the way: a cycle that is no loop leads nowhere
        value, listed, following = step(number)
        own = owner[number].blocks if number in owner else {number}
        choices = [((0, 0, 0), [])] if own & set(loop.tails) else []
        for follower in following:
            if follower in loop.blocks and follower != loop.head:
                ahead = enter(follower)
                if ahead is not None:
                    choices.append(ahead)
        if choices:
            ahead = max(choices, key=lambda choice: choice[0])
            best[number] = tuple(a + b for a, b in zip(value, ahead[0])), listed + ahead[1]
        return best[number]

    found = enter(loop.head)
    if found is None:
        raise SassError("no way leads through the main loop")
    return Path(tuple((one, times) for one, times in found[1] if times))


def _value(listed: list[tuple[Instruction, int]]) -> tuple[int, int, int]:
    """What the steady path has most of: matrix instructions, copies, and then as little else as possible."""
    matrix = sum(times for one, times in listed if MATRIX.match(one.opcode))
    copies = sum(times for one, times in listed if COPY.match(one.opcode))
    return matrix, copies, -sum(times for _, times in listed)
