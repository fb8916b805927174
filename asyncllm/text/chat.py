"""Chat templates: jinja2 in a sandbox, with what templates made for Hugging Face expect.

A template comes with a checkpoint and is not trusted: it runs in jinja's immutable sandbox, and the
text it makes and the steps its loops take are bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Final, NoReturn

from asyncllm.errors import RequestError
from asyncllm.text.bounds import bounded, check_length, check_operator, check_text_call
from asyncllm.text.marks import BEGIN, END, Marked, foreign, marked, plain, unmarked

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_LOOP_STEPS: Final = 1_000_000  # of all loops of one rendering together
_BUDGET: Final = "_loop_budget"
_NOT_ASCII: Final = re.compile(f"[^\x00-\x7f{BEGIN}{END}]")

# Roles are the template's own words: it may spell control tokens with them ("<|" + role + "|>").
# Any other role is the caller's text.
_ROLES: Final = frozenset(
    ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "context")
)

# These look at a text by means that know nothing of marks. What they make of one that a message has
# a part in counts as the message's as a whole.
_PLAIN_FILTERS: Final = frozenset(
    (
        *("e", "escape", "float", "forceescape", "int", "striptags", "title"),
        *("urlencode", "urlize", "wordcount", "wordwrap"),
    )
)

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


class ChatTemplate:
    """A compiled template; it may be used from any thread."""

    def __init__(self, source: str) -> None:
        """Compile it.

        Raises:
            RequestError: if it is no valid template; the message says where.
        """
        from jinja2 import TemplateError, TemplateSyntaxError

        if not isinstance(source, str):
            raise RequestError(f"chat_template: a str is expected, not {type(source).__name__}")
        try:
            self._template: Template = _environment().from_string(_without_marks(source))
        except TemplateSyntaxError as exc:
            raise RequestError(
                f"the chat template does not compile, line {exc.lineno}: {exc.message}"
            ) from exc
        except (TemplateError, ValueError, RecursionError) as exc:
            raise RequestError(f"the chat template does not compile: {exc}") from exc

    def render(
        self,
        messages: Messages,
        tools: Tools,
        add_generation_prompt: bool,
        template_args: Mapping[str, Any] | None,
        special_tokens: Mapping[str, str],
    ) -> tuple[str, bytes]:
        """The conversation as the template writes it, and what in it the template did not write.

        Returns:
            The text, and a 1 for each of its characters that comes from messages, tools or
            documents, a 0 for each other one.

        Raises:
            RequestError: for messages of another form, or if the template fails.
        """
        args = dict(template_args or {})
        variables: dict[str, Any] = {
            **special_tokens,
            "messages": [_foreign_message(message) for message in checked(messages)],
            "tools": foreign(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            **args,
            "documents": foreign(args.get("documents")),
            _BUDGET: [MAX_LOOP_STEPS],
        }
        try:
            text = self._template.render(variables)
        # Whatever a template does wrong, dividing by zero or adding None, is its request's error.
        except Exception as exc:
            raise RequestError(f"the chat template failed: {unmarked(str(exc))}") from exc
        return (text.plain, text.flags) if isinstance(text, Marked) else (text, bytes(len(text)))


def checked(messages: object) -> list[dict[str, Any]]:
    """Messages in the form templates take: a list of text parts becomes their text, line by line.

    Raises:
        RequestError: naming the message, the field, what was found and what is accepted.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages: a sequence of mappings is expected, not {type(messages).__name__}"
        )
    result = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{i}]: a mapping with role and content is expected, "
                f"not {type(message).__name__}"
            )
        role = message.get("role")
        if not isinstance(role, str):
            found = "missing" if role is None else f"of type {type(role).__name__}"
            raise RequestError(f"messages[{i}].role is {found}; a str is expected")
        kept = dict(message)
        if "content" in message:
            kept["content"] = _content(message["content"], f"messages[{i}].content")
        result.append(kept)
    return result


def _content(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise RequestError(
            f"{where} is of type {type(content).__name__}; "
            "accepted are a str, None and a list of text parts"
        )
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f'{where}[{i}] is {kind!r}; accepted is {{"type": "text", "text": ...}}'
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(
                f"{where}[{i}].text is of type {type(text).__name__}; a str is expected"
            )
        texts.append(text)
    return "\n".join(texts)


def _foreign_message(message: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value if key == "role" and value in _ROLES else foreign(value)
        for key, value in message.items()
    }


def _without_marks(source: str) -> str:
    if BEGIN in source or END in source:
        raise ValueError("it holds the noncharacters U+10FFFE or U+10FFFF")
    return source


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """The one environment, made when the first template is: importing jinja2 takes time."""
    from jinja2 import TemplateError, nodes, pass_context
    from jinja2.compiler import CodeGenerator
    from jinja2.ext import Extension, loopcontrols
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generator(CodeGenerator):
        def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
            self.write("environment.concat((")
            for item in node.nodes:
                self.write("str(")
                self.visit(item, frame)
                self.write("), ")
            self.write("))")

    class GenerationBlock(Extension):
        """`{% generation %}` marks the assistant's words for training; here it is transparent."""

        tags = {"generation"}  # noqa: RUF012, jinja's own type

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    class Environment(ImmutableSandboxedEnvironment):
        code_generator_class = Generator
        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def concat(self, parts: Iterable[str]) -> str:
            return marked("".join(bounded(parts)))

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
            return tree

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            check_operator(operator, left, right)
            return _settled(super().call_binop(context, operator, left, right))

        def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
            owner = getattr(method, "__self__", None)
            if isinstance(owner, str):
                check_text_call(method.__name__, (owner, *args), kwargs)
                # A plain string's own methods know nothing of marks in what they are given.
                if method is __obj and type(owner) is str and _any_marked(args):
                    __obj = getattr(Marked(owner, bytes(len(owner))), method.__name__)
            return _settled(super().call(__context, __obj, *args, **kwargs))

    @pass_context
    def counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
        budget = context[_BUDGET]
        for item in items:
            budget[0] -= 1
            if budget[0] < 0:
                raise TemplateError(f"its loops take more than {MAX_LOOP_STEPS} steps")
            yield item

    def raise_exception(message: object) -> NoReturn:
        raise TemplateError(unmarked(str(message)))

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(plain(form))
    environment.filters["tojson"] = _tojson
    for name, function in environment.filters.items():
        environment.filters[name] = _filter(name, function)
    environment.filters["_counted"] = counted
    return environment


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result keeps its marks and its bounds."""

    @wraps(function)  # and with it what jinja is to pass
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        check_text_call(name, args, kwargs)
        if name in _PLAIN_FILTERS and _any_marked(args):
            result = function(*map(plain, args), **kwargs)
            return _settled(foreign(result) if isinstance(result, str) else result)
        return _settled(function(*args, **kwargs))

    return wrapped


def _any_marked(args: tuple[Any, ...]) -> bool:
    return any(isinstance(item, Marked) for item in args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: no HTML escapes, not ASCII alone."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:  # by hand, since the marks must stay what they are
        text = _NOT_ASCII.sub(lambda match: json.dumps(match.group())[1:-1], text)
    return text


def _settled(value: Any) -> Any:
    """A result of a template's operation, within bounds and with its marks."""
    if isinstance(value, str):
        check_length(str.__len__(value))
        return marked(value)
    return value
