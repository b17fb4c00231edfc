"""PTX text -> functions made of instructions, with the Python line of each (PTX ISA, Syntax; Directives)."""
from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field

BITS = {f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64, 128)}
BITS |= {"pred": 8, "f16x2": 32, "bf16": 16, "bf16x2": 32, "tf32": 32}


@dataclass(frozen=True)
class Address:
    """``[base + offset]``, and ``[base, {coordinates}]`` of a tensor operand."""

    base: str
    offset: int = 0
    coordinates: tuple = ()


@dataclass(slots=True)
class Instruction:
    """One PTX instruction. ``operands``: str, tuple (a ``{...}`` vector) or `Address`."""

    opcode: str
    operands: list
    guard: str | None
    negated: bool
    line: int
    text: str
    source: tuple | None
    parts: tuple = ()
    index: int = -1

    def renamed(self, rename):
        def one(operand):
            if isinstance(operand, tuple):
                return tuple(map(one, operand))
            if isinstance(operand, Address):
                return Address(rename(operand.base), operand.offset, tuple(map(one, operand.coordinates)))
            return "|".join(map(rename, operand.split("|"))) if "|" in operand else rename(operand)

        return Instruction(self.opcode, [one(o) for o in self.operands], self.guard and rename(self.guard),
                           self.negated, self.line, self.text, self.source, self.parts)


@dataclass(frozen=True)
class Variable:
    """A declared object: its state space, bytes, alignment, and initial bytes if it has any."""

    name: str
    space: str
    nbytes: int
    align: int
    data: bytes | None = None
    type: str = "b8"
    dynamic: bool = False


@dataclass
class Function:
    name: str
    entry: bool
    parameters: list = field(default_factory=list)
    returns: list = field(default_factory=list)
    registers: dict = field(default_factory=dict)
    variables: dict = field(default_factory=dict)
    instructions: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)
    tables: dict = field(default_factory=dict)  # of brx.idx
    defined: bool = True
    directives: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)  # what others have found out about it, by their own keys


@dataclass
class Module:
    functions: dict
    variables: dict
    files: dict
    target: str
    text: str

    def entry(self, name=None):
        """The kernel called ``name``, or the only one."""
        entries = {f.name: f for f in self.functions.values() if f.entry and f.defined}
        if not entries:
            raise ValueError("kernel must be PTX text with a kernel, but there is no .entry in it")
        if name is None and len(entries) == 1:
            name, = entries
        if name not in entries:
            raise ValueError(f"entry must name one kernel of the PTX text, not {name!r}; "
                             f"it has: {', '.join(entries)}")
        return entries[name]


def split(text):
    """Split at commas outside of brackets."""
    pieces, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and not depth:
            pieces.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return pieces + [last] if last else pieces


_ADDRESS = re.compile(r"([%$\w.]+)\s*(?:([+-])\s*(-?\w+))?$")


def operand(text, rename):
    if text[0] in "{(":
        return tuple(operand(x, rename) for x in split(text[1:-1]))
    if text[0] == "[":
        inside = split(text[1:-1].strip())
        match = _ADDRESS.match(inside[0])
        if match is None:
            raise ValueError(f"address {text} is not understood")
        offset = int(match[3].rstrip("U"), 0) if match[3] else 0
        rest = tuple(operand(x, rename) for x in inside[1:])
        return Address(rename(match[1]), -offset if match[2] == "-" else offset, rest)
    if "|" in text:
        return "|".join(rename(x.strip()) for x in text.split("|"))
    return rename(text)


_SKIP = re.compile(r"\s+")
_LINE_DIRECTIVE = re.compile(r"\.(version|target|address_size|loc|file|section)\b([^\n{;]*)")
_HEADER = re.compile(r"((?:\.(?:visible|weak|extern|common)\s+)*)\.(entry|func)\b([^{;]*)")
_LABEL = re.compile(r"([%$\w]+)\s*:(?!:)")
_VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|extern|common)\s+)*\.(global|const|shared|local|param)\s+"
    r"(?:\.align\s+(\d+)\s+)?(?:\.attribute\([^)]*\)\s*)?(?:\.v([24])\s+)?\.(\w+)\s+([^=]*)(?:=(.*))?$", re.S)
_PARAMETER = re.compile(
    r"\.(?:param|reg)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\b.*?\s)?([%$\w]+)\s*(?:\[(\d+)\])?\s*$")
_INSTRUCTION = re.compile(r"(?:@(!?)\s*([%$\w]+)\s+)?([a-zA-Z][\w.:]*)\s*(.*)$", re.S)
_VECTOR_REGISTER = re.compile(r"([%$\w]+)<(\d+)>")


class _Parser:
    def __init__(self, text):
        self.text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)
        self.text = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), self.text)
        self.newlines = [m.start() for m in re.finditer("\n", self.text)]
        self.module = Module({}, {}, {}, "", text)
        self.scopes, self.scope_count, self.function, self.loc = [], 0, None, None
        self.position = 0

    def line(self, position):
        return bisect.bisect_left(self.newlines, position) + 1

    def rename(self, name):
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def declare(self, name):
        if len(self.scopes) <= 1:
            return name
        self.scopes[-1][name] = unique = f"{name}@{self.scope_count}"
        return unique

    def run(self):
        text, position, end = self.text, 0, len(self.text)
        while True:
            skip = _SKIP.match(text, position)
            self.position = position = skip.end() if skip else position
            if position >= end:
                if self.function is not None:
                    raise ValueError(f"the closing brace of {self.function.name} is missing")
                return self.module
            c = text[position]
            if c == "{":
                self.open()
                position += 1
            elif c == "}":
                self.close()
                position += 1
            elif c == ";":
                position += 1
            elif c == "." and (match := _LINE_DIRECTIVE.match(text, position)):
                self.directive(match[1], match[2])
                position = match.end()
                if match[1] == "section":
                    position = text.index("}", position) + 1
            elif c == "." and self.function is None and (match := _HEADER.match(text, position)):
                if match.end() == end:
                    raise ValueError("neither a body nor a semicolon follows")
                self.header(match[2], match[3], text[match.end()] == "{")
                position = match.end() + (text[match.end()] == ";")
            elif match := _LABEL.match(text, position):
                self.label(match[1])
                position = match.end()
            else:
                stop = text.find(";", position)
                if stop < 0:
                    raise ValueError("a semicolon is missing")
                self.statement(text[position:stop].strip(), position)
                position = stop + 1

    def directive(self, name, rest):
        if name == "target":
            self.module.target = rest.split(",")[0].strip()
        elif name == "file":
            number, path = rest.split(None, 1)
            self.module.files[int(number)] = path.strip().split('"')[1]
        elif name == "loc":
            fields = rest.replace(",", " ").split()
            self.loc = (int(fields[0]), int(fields[1]))

    def header(self, kind, rest, defined):
        lists = re.findall(r"\(([^()]*)\)", rest)
        outside = re.sub(r"\([^()]*\)", " ", rest)
        name = re.search(r"[%$\w]+", re.sub(r"\.\w+", " ", outside.strip().split("\n")[0]) or outside)[0]
        name = re.search(r"(?<![.\w])[A-Za-z_$%][\w$]*", outside)[0]
        function = Function(name, kind == "entry", defined=defined)
        leading = rest.lstrip().startswith("(")
        parameters = lists[1 if leading else 0:] if lists else []
        if leading:
            function.returns = [self.parameter(p) for p in split(lists[0])]
        if parameters:
            function.parameters = [self.parameter(p) for p in split(parameters[0])]
        for directive, values in re.findall(r"\.(maxntid|reqntid|minnctapersm)\s+([\d, ]+)", outside):
            function.directives[directive] = tuple(int(v) for v in values.replace(",", " ").split())
        if name in self.module.functions and self.module.functions[name].defined and defined:
            raise ValueError(f"{name} is defined twice")
        if defined or name not in self.module.functions:
            self.module.functions[name] = function
        if defined:
            self.function = function
            self.loc = None

    @staticmethod
    def parameter(text):
        match = _PARAMETER.match(text.strip())
        if match is None:
            raise ValueError(f"parameter {text!r} is not understood")
        size = BITS[match[2]] // 8
        return Variable(match[3], "param", size * int(match[4] or 1), int(match[1] or size), type=match[2])

    def open(self):
        self.scope_count += len(self.scopes) > 0
        self.scopes.append({"": len(self.function.instructions), "\0labels": {}})

    def close(self):
        scope = self.scopes.pop()
        labels = scope["\0labels"]
        for instruction in self.function.instructions[scope[""]:] if labels else ():
            if instruction.parts[0] == "bra":
                target = instruction.operands[0]
                instruction.operands[0] = labels.get(target, target)
        if not self.scopes:
            self.function = None

    def label(self, name):
        if len(self.scopes) > 1:
            self.scopes[-1]["\0labels"][name] = name = f"{name}@{self.scope_count}"
        self.function.labels[name] = len(self.function.instructions)
        self.last_label = name

    def statement(self, text, position):
        if text.startswith(".reg"):
            self.registers(text)
        elif match := _VARIABLE.match(text):
            self.variable(text, *match.groups())
        elif text.startswith(".branchtargets"):
            targets = [self.rename(name) for name in split(text[len(".branchtargets"):])]
            self.function.tables[self.last_label] = targets
        elif text[0] != ".":
            self.instruction(text, position)
        elif not text.startswith((".pragma", ".alias", ".callprototype")):
            raise ValueError("this statement is not known")

    def registers(self, text):
        kind, names = re.match(r"\.reg\s*\.(\w+)\s+(.*)", text, re.S).groups()
        for name in names.split(","):
            match = _VECTOR_REGISTER.match(name.strip())
            for one in [f"{match[1]}{i}" for i in range(int(match[2]))] if match else [name.strip()]:
                self.function.registers[self.declare(one)] = kind

    def variable(self, text, space, align, vector, kind, names, initial):
        size = BITS[kind] // 8 * int(vector or 1)
        for name in names.split(","):
            match = re.match(r"([%$\w.]+)\s*((?:\[\s*\d*\s*\])*)", name.strip())
            shape = re.findall(r"\[\s*(\d*)\s*\]", match[2])
            count, dynamic = 1, False
            for extent in shape:
                dynamic |= extent == ""
                count *= int(extent or 0)
            data = None if initial is None else self.initial(initial, kind)
            nbytes = size * count
            if data is not None:
                nbytes = max(nbytes, len(data)) if dynamic else nbytes
                data = data.ljust(nbytes, b"\0")
            name = match[1]
            dynamic = dynamic and space == "shared"
            owner = self.module.variables
            if self.function is not None:
                name, owner = self.declare(name), self.function.variables
            owner[name] = Variable(name, space, nbytes, int(align or size), data, kind, dynamic)

    @staticmethod
    def initial(text, kind):
        size, data = BITS[kind] // 8, bytearray()
        for item in re.findall(r"[^{},\s]+", text):
            if item[:2] in ("0f", "0F", "0d", "0D"):
                value = int(item[2:], 16)
            else:
                value = int(item.rstrip("U"), 0)
            data += (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        return bytes(data)

    def instruction(self, text, position):
        match = _INSTRUCTION.match(text)
        if match is None or self.function is None:
            raise ValueError("no instruction of a function" if match else "this is no instruction")
        negated, guard, opcode, rest = match.groups()
        source = self.loc and (self.module.files.get(self.loc[0], self.loc[0]), self.loc[1])
        rename = self.rename if len(self.scopes) > 1 else str
        operands = [operand(x, rename) for x in split(rest)]
        self.function.instructions.append(Instruction(
            opcode, operands, guard and rename(guard), bool(negated), self.line(position), text, source,
            tuple(opcode.split("."))))


def parse(text: str) -> Module:
    """Parse PTX text.

    Files named by ``.file`` at the end of the text are known to all instructions.

    Raises
    ------
    ValueError
        If it is no PTX; the message quotes the line.
    """
    parser = _Parser(text)
    for number, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M):
        parser.module.files[int(number)] = path
    try:
        return parser.run()
    except (ValueError, IndexError, KeyError, AttributeError, TypeError) as error:
        rest = parser.text[parser.position:].lstrip()
        quoted = rest.partition("\n")[0].rstrip()[:80]
        where = f"line {parser.line(parser.position)}, {quoted!r}" if quoted else "its end"
        why = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"kernel must be PTX text, which this is not: at {where}: {why}") from None
