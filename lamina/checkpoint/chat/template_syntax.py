"""The syntax tree of chat templates: loops that can be stopped, operators that can be limited, {% generation %}."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

TESTS = {"in": "in", "notin": "in", "eq": "eq", "ne": "ne"}  # operators that become tests


class Limited(NodeTransformer):
    """Makes loops tick, and calls filters and tests where Jinja would compile an operator to Python's own."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return filtered(nodes.Tuple(node.nodes, "load"), "~", node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return filtered(node, "[:]", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        if len(node.ops) != 1 or node.ops[0].op not in TESTS:
            return node
        operator, other = node.ops[0].op, node.ops[0].expr
        test = at(node, nodes.Test(node.expr, TESTS[operator], [other], [], None, None))
        return at(node, nodes.Not(test)) if operator == "notin" else test


def filtered(value: nodes.Expr, name: str, where: nodes.Node) -> nodes.Expr:
    return at(where, nodes.Filter(value, name, [], [], None, None))


def at(where: nodes.Node, node: nodes.Expr) -> nodes.Expr:
    node.set_lineno(where.lineno)
    return node


class Generation(Extension):
    """{% generation %} marks what the assistant said, for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
