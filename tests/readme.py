"""README.md, taken apart: its sections, its code blocks, the commands in them, and the tables that follow the code.

`python -m tests.readme` writes those tables anew.
"""

import inspect
import re
import shlex

from app import keys, settings
from tests.command_lines import ROOT, is_known

PATH = ROOT / "README.md"


def text() -> str:
    return PATH.read_text()


def section(heading: str) -> str:
    """What is below `## heading`, up to the next one."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text(), re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no section {heading!r}"
    return found[1]


def blocks(language: str, of: str | None = None) -> list[str]:
    """The code blocks in a language, of one section or of all."""
    return re.findall(rf"^```{language}\n(.*?)^```$", of if of is not None else text(), re.MULTILINE | re.DOTALL)


def spans() -> list[str]:
    """The code spans outside of code blocks."""
    prose = re.sub(r"^```.*?^```$", "", text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", prose)


def commands(block: str) -> list[str]:
    """The commands of a shell block, in order; one may go over several lines."""
    found: list[str] = []
    pending = ""
    for line in block.splitlines():
        pending += line + "\n"
        try:
            shlex.split(pending)
        except ValueError:  # a quote is open
            continue
        if pending.strip():
            found.append(pending.strip())
        pending = ""
    assert not pending, f"an open quote: {pending}"
    return found


def command_lines() -> list[list[str]]:
    """Every command of the shell blocks, and those in the running text that have arguments, in words."""
    lines = [part for block in blocks("sh") for one in commands(block) for part in one.split(" && ")]
    inline = [shlex.split(span) for span in spans() if span.count("'") % 2 == 0]
    known = [words for words in inline if len(words) > 1 and is_known(words[0])]
    return [shlex.split(line, comments=True) for line in lines] + known


def dialogue(block: str) -> list[tuple[str, list[str]]]:
    """(command, the lines that it prints) of a console block."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)
    return found


def settings_table() -> str:
    """A row for each setting: path, default, meaning."""
    defaults = settings.leaves(settings.Settings().model_dump(mode="json"))
    rows = [
        f"| `{path}` | {_default(defaults[path])} | {_cell(meaning)} |" for path, meaning in settings.known().items()
    ]
    return "\n".join(["| setting | default | meaning |", "| --- | --- | --- |", *rows])


def keys_table() -> str:
    """The table in the docstring of app.keys."""
    assert keys.__doc__ is not None
    return "\n".join(line for line in inspect.cleandoc(keys.__doc__).splitlines() if line.startswith("|"))


#: The tables that follow the code, by the name of their mark.
GENERATED = {"settings": settings_table, "keys": keys_table}


def marked(name: str) -> str:
    """What stands between `<!-- name -->` and `<!-- /name -->`."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- /{name} -->", text(), re.DOTALL)
    assert found, f"README.md has no place for {name}"
    return found[1]


def rows(table: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _default(value: object) -> str:
    if value in (None, "", []):
        return ""
    if isinstance(value, list):
        return f"`{','.join(map(str, sorted(value)))}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(meaning: str) -> str:
    return " ".join(meaning.split()).replace("|", "\\|")


def main() -> None:
    written = text()
    for name, table in GENERATED.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        written = place.sub(lambda found, table=table: f"{found[1]}{table()}\n{found[2]}", written)
    PATH.write_text(written)


if __name__ == "__main__":
    main()
