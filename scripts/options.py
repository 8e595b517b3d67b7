"""Writes docs/options.md, the options of every command, from where they are declared: `python scripts/options.py`."""

from __future__ import annotations

from pathlib import Path

from server import options
from server.cli.commands import DOCTOR, FOLLOW, GATEWAY, INSTANCE, UP_ITSELF

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
ABOUT = """# Options

A flag goes before an environment variable, that before the file that `--config FILE` names, and that before the
default. The file is YAML, with one option a line by its name without dashes in front:

```yaml
port: 8080
keep-versions: 3
require-key: true
```

Switches take `true` and `false` there and in variables. What may be given several times is a list in the file, and
separated by commas in a variable. `hotswap up` and `hotswap instance` pass options that are not listed here to vLLM;
those stay on the command line. `hotswap up MODEL` is the same as `hotswap up --model MODEL`. `hotswap up` also takes
every option of `hotswap gateway` but `--check`, and passes it to the gateway that it starts; the variable of `--hold`
is then `HOTSWAP_UP_HOLD`, or `HOTSWAP_GATEWAY_HOLD`. `hotswap up --help` shows what is needed daily,
`hotswap up --help-all` every option. `scripts/options.py` makes this page from the declarations in the code.
"""


def page() -> str:
    """The page as the code has it."""
    commands = {"up": UP_ITSELF, "gateway": GATEWAY, "instance": INSTANCE, "follow": FOLLOW, "doctor": DOCTOR}
    return ABOUT + "".join(f"\n## `hotswap {name}`\n\n{options.table(found)}" for name, found in commands.items())


if __name__ == "__main__":
    PAGE.write_text(page())
