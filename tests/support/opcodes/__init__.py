"""Tables of what each PTX instruction does, one file per group of sections of the ISA."""

import importlib

FILES = (
    "integer",
    "bits",
    "floating",
    "half",
    "convert",
    "predicate",
    "memory",
    "warp",
    "matrix",
    "asynchronous",
    "control",
)

FAMILIES = [
    family for name in FILES for family in getattr(importlib.import_module(f"opcodes.{name}"), "FAMILIES", ())
]
PROGRAMS = [
    program
    for name in FILES
    for program in getattr(importlib.import_module(f"opcodes.{name}"), "PROGRAMS", ())
]
