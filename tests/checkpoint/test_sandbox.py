"""Chat templates that loop, or grow a text, are stopped; ordinary ones are rendered as transformers does."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from lamina.checkpoint.chat import sandbox
from lamina.checkpoint.chat.template import render
from lamina.errors import InputError

MESSAGES = [{"role": "user", "content": "hello " * 1000}]
GROW = "{% set ns = namespace(x=X) %}{% for i in range(99) %}{% set ns.x = Y %}{% endfor %}"

LOOPS = {
    "nested": "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
    "condition": "{% for i in range(10**5) %}{% for j in range(10**5) if j < 0 %}{% endfor %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "set": "{% set x %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}{% endset %}",
    "select": "{% set s = 'a' * 16000000 %}{{ range(99999) | map('string') | select('in', s) | list }}",
    "map": "{% set s = 'b' * 16000000 %}{{ range(99999) | map('replace', s, s) | list }}",
}
SIZES = {
    "times": "{{ 'a' * 3000000000 }}",
    "times, the other way": "{% set x = 3000000000 * 'a' %}",
    "list": "{{ [1] * 3000000000 }}",
    "tuple": "{{ (1,) * 3000000000 }}",
    "plus": GROW.replace("X", "'aaaa'").replace("Y", "ns.x + ns.x"),
    "tilde": GROW.replace("X", "'aaaa'").replace("Y", "ns.x ~ ns.x"),
    "lists": GROW.replace("X", "[1] * 5000000").replace("Y", "ns.x + ns.x"),
    "output": "{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}",
    "block": "{% set x %}{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}{% endset %}",
    "macro": "{% macro f() %}{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}{% endmacro %}{{ f() }}",
    "printed": GROW.replace("X", "['a']").replace("Y", "[ns.x, ns.x]") + "{{ ns.x }}",
    "json": GROW.replace("X", "['a']").replace("Y", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "namespace": GROW.replace("X", "['a']").replace("Y", "[ns.x, ns.x]") + "{{ [ns] }}",
    "items": GROW.replace("X", "['a']").replace("Y", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x.items() }}",
    "joined to a text": GROW.replace("X", "['a']").replace("Y", "[ns.x, ns.x]") + "{% set y = '' ~ ns.x %}",
    "upper": GROW.replace("X", "['a']").replace("Y", "[ns.x, ns.x]") + "{% set y = ns.x | upper %}",
    "format": GROW.replace("X", "['a']").replace("Y", "[ns.x, ns.x]") + "{% set y = '%s' % [ns.x] %}",
    "%": "{{ '%3000000000d' % 1 }}",
    "%*": "{{ '%*d' % (3000000000, 1) }}",
    "% by name": "{{ ('%(a)9999s' * 10000) % {'a': 1} }}",
    "format filter": "{{ '%3000000000d' | format(1) }}",
    "str.format": "{{ '{:>3000000000}'.format('a') }}",
    "str.format, nested": "{{ '{:>{w}}'.format('a', w=3000000000) }}",
    "str.format_map": "{{ '{a:>3000000000}'.format_map({'a': 1}) }}",
    "center": "{{ 'a'.center(3000000000) }}",
    "center filter": "{{ 'a' | center(3000000000) }}",
    "zfill": "{{ 'a'.zfill(3000000000) }}",
    "expandtabs": "{{ ('\\t' * 1000000).expandtabs(99999) }}",
    "indent": "{{ ('a\\n' * 100000) | indent(99999) }}",
    "json indent": "{{ [1] | tojson(indent=3000000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "replace by name": "{{ ('a' * 1000000) | replace(old='a', new='b' * 1000000) }}",
    "join": "{{ ('a' * 1000000).join(range(999) | map('string')) }}",
    "join filter": "{{ range(999) | join('a' * 1000000) }}",
    "batch": "{{ [1] | batch(3000000000, 0) | list }}",
    "slice": "{{ [1] | slice(3000000000) | list }}",
    "sum": "{{ ([[1] * 9000000] * 9) | sum(start=[]) }}",
    "power": "{{ 10 ** 3000000000 }}",
    "numbers": GROW.replace("X", "7").replace("Y", "ns.x * ns.x"),
    "round": "{{ 1.5 | round(3000000000, 'floor') }}",
    "search backwards": "{{ ('a' * 16000000).rfind('b' + 'a' * 8000000) }}",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_takes_too_long_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.1)
    started = time.monotonic()
    with pytest.raises(InputError, match=r"the chat template 'odd' ran for more than 0.1 s: use another one, or give"):
        render("odd", LOOPS[name], {"messages": MESSAGES})
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("name", SIZES)
def test_a_template_that_makes_too_much_is_stopped_before_it_does(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"the chat template 'odd' (makes|calls|computes) .*(limit|more than)"):
            render("odd", SIZES[name], {"messages": MESSAGES})
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()


def test_what_a_template_makes_altogether_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "ALTOGETHER", 10**7)
    for made in ("s[i:]", "s | upper", "s.upper()", "s + 'b'", "s ~ 'b'", "[s, s] | join", "s | replace('a', 'b')"):
        template = (
            "{% set s = 'a' * 100000 %}{% set ns = namespace(kept=[]) %}{% for i in range(9999) %}"
            "{% set ns.kept = ns.kept + [MADE] %}{% endfor %}"
        )
        with pytest.raises(InputError, match="makes texts and lists of more than 10,000,000 elements altogether"):
            render("odd", template.replace("MADE", made), {})


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed on these messages: RecursionError"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "failed on these messages: RecursionError"),
        ("{{ 1 / 0 }}", "failed on these messages: ZeroDivisionError: division by zero"),
        ("{{ 'a' + none }}", "failed on these messages: TypeError: can only concatenate str"),
        ("{{ messages[0] | tojson(indent='a' * 9 + 3) }}", "failed on these messages: TypeError"),
        ("{% if %}", "refused these messages: Expected an expression"),
        ("{{ 'a'.encode() }}", "refused these messages: access to attribute 'encode'"),
        ("{{ (5).to_bytes(3000000000, 'big') }}", "refused these messages: access to attribute 'to_bytes'"),
        ("{{ lipsum(n=1000000) }}", "refused these messages: 'lipsum' is undefined"),
    ],
)
def test_errors_of_a_template_name_it(template: str, problem: str) -> None:
    with pytest.raises(InputError, match=rf"the chat template 'odd' {problem}"):
        render("odd", template, {"messages": MESSAGES})


ORDINARY = r"""
{%- set ns = namespace(text='', n=0) -%}
{%- macro show(x, times=2) -%}[{{ x }}{{ '-' * times }}]{%- endmacro -%}
{%- for m in messages if m.role != 'system' -%}
{%- set ns.text = ns.text + m.content | trim ~ loop.index -%}{%- set ns.n = ns.n + 1 -%}
{{ loop.first }}{{ show(m.content[1:-1].split(' ')[-1] | upper) }}{{ m.content | length // 2 }}
{%- if 'b' in m.content and 'z' not in m.content and m.role == 'user' or m.role != 'user' -%}
{{ '%s is %5.2f' % (m.role, 1.5) }}{{ '{:>5}'.format(loop.index0) }}{{ m.content.replace('b', 'c').startswith('a') }}
{%- endif -%}{%- if loop.index == 3 -%}{% break %}{%- endif -%}
{%- endfor -%}
{{ ns.text }}{{ messages | map(attribute='role') | join(', ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ [1, 2] | sum }}{{ messages[::-1] | first }}{{ messages[0] | tojson(indent=2) }}{{ 2 ** 10 * 3 % 7 }}
{{ 'a\nb' | indent(3) }}{{ ['x', 'y'] | join('|') }}{{ 'abc' | replace('b', '') | center(9) }}{{ [3, 1] | sort }}
{{ none }}{{ missing | default('d') }}{{ 1 < 2 < 3 }}{{ {'a': [1, none]} }}{{ messages | tojson }}{{ 7 is odd }}
{%- for a, b in messages[0].items() recursive %}{{ a ~ '=' ~ b }}{% else %}none{% endfor -%}
{% generation %}{{ 'b' in ['a', 'b'] }}{% endgeneration %}{% set s | upper %}up{{ ns.n }}{% endset %}{{ s }}{{ s[0] }}
"""


def test_ordinary_templates_are_rendered_as_transformers_renders_them() -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    messages = [
        {"role": "system", "content": "Be <brief> & “kind”."},
        {"role": "user", "content": " a b c "},
        {"role": "assistant", "content": "abz"},
        {"role": "user", "content": ""},
    ]
    expected = _compile_jinja_template(ORDINARY).render(messages=messages)
    assert render("default", ORDINARY, {"messages": messages}) == expected
