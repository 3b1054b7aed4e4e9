"""Generates small wrong changes of Python and C++ sources, from their syntax trees.

A change replaces a range of a file's text. tree-sitter parses both languages, so that a change is of an expression or a
statement and nearly always compiles. Skipped are types, texts, decorators, assertions and strict zips, what only
compilers read, and constants in seconds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import tree_sitter_cpp
import tree_sitter_python
from functions import named_functions
from tree_sitter import Language, Node, Parser

CPP = (".h", ".cpp", ".cu")
MOVED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
NEGATED = {"==": "!=", "!=": "==", "in": "not in", "not in": "in", "is": "is not", "is not": "is"}
LOGIC = {"and": "or", "or": "and", "&&": "||", "||": "&&"}
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "*", "**": "*", "<<": ">>", ">>": "<<"}
ARITHMETIC |= {"&": "|", "|": "&", "^": "|"}
UPDATES = {"+=": "-=", "-=": "+=", "*=": "+=", "|=": "&=", "&=": "|=", "<<=": ">>=", ">>=": "<<="}
OPERATORS = {"boundary moved": MOVED, "negated": NEGATED, "and for or": LOGIC, "operator": {**ARITHMETIC, **UPDATES}}
CALLEES = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Functions of arguments in any order.
ANY_ORDER = re.compile(
    r"torch\.equal|(?:\w+(?:::|\.))?(?:min|max|minimum|maximum|gcd|lcm|(?:min|max)_of(?:<[\w: ]+>)?)"
)
JUMPS = {"continue_statement": "break", "break_statement": "continue"}

SKIPPED = {
    *(
        "type",
        "string",
        "concatenated_string",
        "decorator",
        "assert_statement",
        "import_statement",
        "comment",
        "lambda_",
    ),
    *("import_from_statement", "future_import_statement", "template_argument_list", "template_parameter_list"),
    *("static_assert_declaration", "array_declarator", "type_descriptor", "string_literal", "raw_string_literal"),
    *(
        "enumerator_list",
        "attribute_declaration",
        "preproc_def",
        "preproc_function_def",
        "preproc_include",
        "asm_statement",
    ),
    *("parameter_list", "requires_clause", "alignas_qualifier", "ERROR", "preproc_directive", "gnu_asm_expression"),
}
CONDITIONS = {"if_statement", "elif_clause", "while_statement", "for_statement", "do_statement"}
SIMPLE = {"expression_statement", "if_statement"}
COMPILER_ONLY = re.compile(r"\bMOE_RT_FN\b|__\w+__(?!\()|\b__launch_bounds__\([^)]*\)")


@dataclass(frozen=True)
class Change:
    """text[start:end] of a file becomes `replace`; `statement` says which of the two a C++ switch must contain."""

    file: str
    function: str
    operator: str
    line: int
    start: int
    end: int
    find: str
    replace: str
    statement: bool = False

    def apply(self, text: str) -> str:
        return text[: self.start] + self.replace + text[self.end :]


Edit = tuple[str, int, int, str]  # operator, start, end, replacement


@functools.cache
def _parser(cpp: bool) -> Parser:
    return Parser(Language((tree_sitter_cpp if cpp else tree_sitter_python).language()))


def parse(file: str, text: str) -> Node:
    """Return the syntax tree, whose offsets are those of the text."""
    cpp = file.endswith(CPP)
    if cpp:
        text = COMPILER_ONLY.sub(lambda match: " " * len(match[0]), text)
    return _parser(cpp).parse(text.encode("ascii", "replace")).root_node  # one byte for each character


def generate(file: str, text: str) -> list[Change]:
    """Return all changes of a file, each of them once."""
    spans = sorted(named_functions(file, text), key=lambda span: span[2] - span[1])
    language = _Cpp(text) if file.endswith(CPP) else _Python(text)
    found = {}
    for operator, start, end, replace in language.edits(parse(file, text)):
        if text[start:end] != replace and "\n#" not in text[start:end]:
            function = next((name for name, first, last in spans if first <= start < last), "")
            line = text.count("\n", 0, start) + 1
            statement = operator in ("left out", "neighbours swapped", "jump")
            change = Change(file, function, operator, line, start, end, text[start:end], replace, statement)
            found.setdefault((start, end, replace), change)
    return sorted(found.values(), key=lambda change: (change.start, change.end, change.replace))


class _Language:
    """The part that both languages share."""

    statements = ""  # type of a node that holds statements
    arguments = "argument_list"
    literals = ("integer", "float", "true", "false", "number_literal")

    def __init__(self, text: str) -> None:
        self.text = text

    def edits(self, node: Node) -> Iterator[Edit]:
        if node.type in SKIPPED or self.skips(node):
            return
        yield from self.of_operators(node)
        yield from self.of_node(node)
        if node.type in self.literals:
            yield from self.of_literal(node)
        if node.type == self.arguments:
            yield from self.of_arguments(node)
        if node.type == self.statements:
            yield from self.of_neighbours(node)
        for child in node.children:
            yield from self.edits(child)

    def said(self, node: Node) -> str:
        return self.text[node.start_byte : node.end_byte]

    def of_operators(self, node: Node) -> Iterator[Edit]:
        # `is not` is one node of two words, which any amount of space may separate.
        if not re.search(r"binary|comparison|boolean_operator|augmented|assignment_expression", node.type):
            return
        for child in node.children:
            word = " ".join(self.said(child).split())
            if child.type == word:
                for operator, table in OPERATORS.items():
                    if word in table:
                        yield self.of_operator(operator, node, child, table[word])

    def of_operator(self, operator: str, node: Node, child: Node, word: str) -> Edit:
        return operator, child.start_byte, child.end_byte, word

    def of_literal(self, node: Node) -> Iterator[Edit]:
        word = self.said(node)
        flipped = {"True": "False", "False": "True", "true": "false", "false": "true"}.get(word)
        if flipped:
            yield "constant", node.start_byte, node.end_byte, flipped
        elif re.fullmatch(r"[\d_]+", word):
            yield "constant", node.start_byte, node.end_byte, str(int(word) + 1)
        elif re.fullmatch(r"[\d.]+(e-?\d+)?", word) and float(word):
            yield "constant", node.start_byte, node.end_byte, repr(2 * float(word))

    def of_arguments(self, node: Node) -> Iterator[Edit]:
        function = node.parent.child_by_field_name("function") if node.parent is not None else None
        if function is not None and ANY_ORDER.fullmatch(self.said(function)):
            return
        some = [child for child in node.named_children if child.type != "comment"]
        for first, second in pairwise(some):
            if self.may_swap(first, second):
                first_value, second_value = self.value(first), self.value(second)
                replace = (
                    self.said(second_value)
                    + self.text[first_value.end_byte : second_value.start_byte]
                    + self.said(first_value)
                )
                yield self.of_call("arguments swapped", node, first_value.start_byte, second_value.end_byte, replace)

    def of_call(self, operator: str, node: Node, start: int, end: int, replace: str) -> Edit:
        return operator, start, end, replace

    def value(self, argument: Node) -> Node:
        return argument.child_by_field_name("value") or argument

    def of_neighbours(self, node: Node) -> Iterator[Edit]:
        for first, second in pairwise(node.named_children):
            if first.type in SIMPLE and second.type in SIMPLE and self._independent(first, second):
                between = self.text[first.end_byte : second.start_byte]
                swapped = self.said(second) + between + self.said(first)
                yield "neighbours swapped", first.start_byte, second.end_byte, swapped

    def _independent(self, first: Node, second: Node) -> bool:
        """False if swapping them changes nothing, or is plainly an error: one sets a name that the other uses."""
        if (
            first.parent is not None
            and first.parent.parent is not None
            and first.parent.parent.type == "class_definition"
        ):
            return False
        if any(self._plain(left) for node in (first, second) for left in self._left_of(node)):
            return False
        if self._in_any_order(first, second):
            return False
        if any(child.type in ("string", "assert_statement") for node in (first, second) for child in node.children[:1]):
            return False
        return not any(
            re.search(rf"(?<![\w.]){re.escape(name)}\b", self.said(other))
            for node, other in ((first, second), (second, first))
            for name in self._sets(node)
        )

    def _in_any_order(self, first: Node, second: Node) -> bool:
        """True if both set attributes to values without calls, and neither uses the other's."""
        return all(
            left.type == "attribute"
            and not re.search(r"[\w\])]\(", self.said(node))
            and not re.search(rf"{re.escape(self.said(left))}\b", self.said(other))
            for node, other in ((first, second), (second, first))
            for left in self._left_of(node) or [node]
        )

    def _left_of(self, statement: Node) -> list[Node]:
        """Return the target of a statement that is an assignment."""
        inner = statement.children[0] if statement.type == "expression_statement" and statement.children else None
        assigns = inner is not None and inner.type in ("assignment", "assignment_expression")
        left = inner.child_by_field_name("left") if assigns and inner is not None else None
        return [] if left is None else [left]

    def _sets(self, node: Node) -> set[str]:
        left = node.child_by_field_name("left")
        names = set()
        if node.type in ("assignment", "assignment_expression", "named_expression") and left is not None:
            names = (
                {self.said(name) for name in _walk(left) if name.type == "identifier"} if self._plain(left) else set()
            )
        return names.union(*(self._sets(child) for child in node.children))

    def _plain(self, left: Node) -> bool:
        return left.type in ("identifier", "pattern_list", "tuple_pattern")

    # Each language adds to these.
    def skips(self, node: Node) -> bool:
        return False

    def may_swap(self, first: Node, second: Node) -> bool:
        return True

    def of_node(self, node: Node) -> Iterator[Edit]:
        yield from ()


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _walk(child)


class _Python(_Language):
    statements = "block"

    def skips(self, node: Node) -> bool:
        if node.type == "keyword_argument" and self.said(node).startswith("strict="):  # an assertion of zip
            call = node.parent.parent if node.parent is not None else None
            return call is not None and self.said(call).startswith("zip(")
        if node.type == "assignment":  # no verdict depends on how long something may take
            left = node.child_by_field_name("left")
            return left is not None and re.fullmatch(r"(_?[A-Z][A-Z\d_]*_S(, )?)+", self.said(left)) is not None
        condition = node.child_by_field_name("condition")
        return node.type == "if_statement" and condition is not None and "TYPE_CHECKING" in self.said(condition)

    def may_swap(self, first: Node, second: Node) -> bool:
        keywords = [argument.type == "keyword_argument" for argument in (first, second)]
        starred = any(argument.type.endswith("splat") for argument in (first, second))
        return keywords[0] == keywords[1] and not starred

    def of_arguments(self, node: Node) -> Iterator[Edit]:
        yield from super().of_arguments(node)
        for argument in node.named_children:
            if argument.type == "keyword_argument" and not self.skips(argument):
                comma = re.compile(r"\s*,\s*").match(self.text, argument.end_byte)
                yield "keyword left out", argument.start_byte, comma.end() if comma else argument.end_byte, ""

    def of_node(self, node: Node) -> Iterator[Edit]:
        condition = node.child_by_field_name("condition") if node.type in CONDITIONS else None
        if node.type == "conditional_expression":
            condition = node.named_children[1]
        elif node.type == "if_clause":
            condition = node.named_children[0]
        if condition is not None:
            yield "negated", condition.start_byte, condition.end_byte, f"not ({self.said(condition)})"
        elif node.type == "call":
            function = node.child_by_field_name("function")
            if function is not None and self.said(function) in CALLEES:
                yield "callee", function.start_byte, function.end_byte, CALLEES[self.said(function)]
        elif node.type == "except_clause" and (body := node.named_children[-1]).type == "block":
            if self.said(body) != "pass":
                yield "error swallowed", body.start_byte, body.end_byte, "pass"
        elif node.type == "return_statement" and self.said(node) not in ("return", "return None", "return False"):
            yield "returns nothing", node.start_byte, node.end_byte, "return None"
        elif node.type in JUMPS:
            yield "jump", node.start_byte, node.end_byte, JUMPS[node.type]
        elif self._may_be_left_out(node):
            yield "left out", node.start_byte, node.end_byte, "pass"

    def _may_be_left_out(self, node: Node) -> bool:
        if node.type == "expression_statement":
            what = node.children[0]
            left = what.child_by_field_name("left")
            has_value = what.child_by_field_name("right") is not None
            sets = what.type == "assignment" and has_value and left is not None and not self._plain(left)
            return what.type in ("call", "augmented_assignment", "await") or sets
        if node.type == "return_statement":  # at the end of a function it makes no difference
            block, function = node.parent, node.parent.parent if node.parent else None
            last = block is not None and block.named_children[-1] == node
            return not (last and function is not None and function.type == "function_definition")
        return node.type in ("raise_statement", "delete_statement")


class _Cpp(_Language):
    """C++. A change is of a whole expression, because a switch chooses between two of them."""

    statements = "compound_statement"

    _bodies = 0  # of functions around the node that is looked at

    def edits(self, node: Node) -> Iterator[Edit]:
        body = node.type == "compound_statement"
        self._bodies += body
        if self._bodies:
            yield from super().edits(node)
        elif node.type not in SKIPPED:
            for child in node.children:
                yield from self.edits(child)
        self._bodies -= body

    def skips(self, node: Node) -> bool:
        head = self.said(node).lstrip()
        if node.type == "declaration":
            return bool(re.match(r"(static\s+)?(inline\s+)?constexpr\b|static\b", head))
        inside = node.parent
        if inside is not None and inside.type == "if_statement" and node.type == "condition_clause":
            return self.said(inside).startswith("if constexpr")
        return inside is not None and inside.type == "case_statement" and node == inside.child_by_field_name("value")

    def _plain(self, left: Node) -> bool:
        return left.type == "identifier"

    def of_operator(self, operator: str, node: Node, child: Node, word: str) -> Edit:
        replace = (
            self.text[node.start_byte : child.start_byte] + word + self.text[child.end_byte : node.end_byte]
        )  # the whole expression
        return operator, node.start_byte, node.end_byte, replace

    def of_call(self, operator: str, node: Node, start: int, end: int, replace: str) -> Edit:
        call = node.parent
        if call is None or call.type != "call_expression":
            return operator, start, start, ""
        whole = self.text[call.start_byte : start] + replace + self.text[end : call.end_byte]
        return operator, call.start_byte, call.end_byte, whole

    def of_node(self, node: Node) -> Iterator[Edit]:
        condition = node.child_by_field_name("condition") if node.type in CONDITIONS else None
        if node.type == "conditional_expression":
            condition = node.child_by_field_name("condition")
        if condition is not None and condition.type == "condition_clause":
            condition = condition.child_by_field_name("value")
        declares = condition is not None and condition.type in (
            "declaration",
            "init_statement",
            "condition_declaration",
        )
        if condition is not None and not declares and not self.said(node).startswith("if constexpr"):
            yield "negated", condition.start_byte, condition.end_byte, f"!({self.said(condition)})"
        if node.type == "unary_expression" and self.said(node).startswith("!"):
            yield "negated", node.start_byte, node.end_byte, f"!{self.said(node)}"
        elif node.type == "call_expression":
            function = node.child_by_field_name("function")
            name = self.said(function) if function is not None else ""
            short = name.split("::")[-1]
            if short in ("min", "max") and function is not None:
                other = name[: len(name) - 3] + CALLEES[short]
                yield "callee", node.start_byte, node.end_byte, other + self.text[function.end_byte : node.end_byte]
        elif node.type == "expression_statement" and node.named_children:
            yield "left out", node.start_byte, node.end_byte, ";"
        elif node.type in JUMPS:
            yield "jump", node.start_byte, node.end_byte, JUMPS[node.type] + ";"
        elif node.type == "return_statement" and self.said(node) == "return;":
            yield "left out", node.start_byte, node.end_byte, ";"
