"""Chat templates and conversations of the tests."""

from __future__ import annotations

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
MARKED = """\
{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}
[A]{% generation %} {{ m['content'] | trim }}{{ eos_token }}{% endgeneration %}

{% else %}
[{{ m['role'][0] | upper }}] {{ m['content'] | trim }}
{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}
"""
SYSTEM = """\
{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{% set messages = messages[1:] %}{% else %}{% set system = 'Be brief.' %}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{% if loop.index0 == 0 %}{{ '<<SYS>>' + system + '<</SYS>> ' }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}
"""
LOOPS = """\
{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}
{{ loop.index }}:{{ m | tojson }}{% if loop.last %}{% break %}{% endif %}
{% endfor %}
"""
NAMESPACE = """\
{% set ns = namespace(turns=0) %}{% for m in messages %}{% set ns.turns = ns.turns + 1 %}
{% macro say(m) %}({{ m.role }}) {{ m.content }}
{% endmacro %}{{ say(m) }}{% endfor %}{{ ns.turns }} turns
"""
CONVERSATIONS = [
    [{"role": "user", "content": " 2 + 2? "}, {"role": "assistant", "content": "4"}],
    [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": "one \u00e9\n\nline"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
        {"role": "assistant", "content": "four <b>'\"&"},
    ],
    [{"role": "user", "content": "alone"}],
]
