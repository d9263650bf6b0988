"""Generate docs/flags.md from the option declarations: `python -m vae.config.flags_table > docs/flags.md`."""

from dataclasses import fields

from vae.config.flags import COMMON, default_text
from vae.config.options import ActionConfig, section_title, sections


def flags_markdown() -> str:
    """The whole page: every flag that --help leaves out, with its meaning and default."""
    lines = [
        "# More flags of train_vae.py",
        "",
        f"`python train_vae.py --help` shows the {len(COMMON)} most used flags, this page the others, and",
        "`--help_all` both. Each is also a key of the JSON file of `--config`, except the actions. Every",
        "on/off flag also has a `--no-` form. Without a default, it is off.",
    ]
    for name, section in {"actions": ActionConfig, **sections()}.items():
        lines += ["", f"## {name}", "", section_title(section), ""]
        lines += ["| flag and default | meaning |", "|---|---|"]
        for item in fields(section):
            if item.name in COMMON:
                continue
            choices = item.metadata["choices"]
            meaning = item.metadata["help"] + (f" ({', '.join(choices)})" if choices else "")
            default = default_text(item)
            lines.append(
                f"| `--{item.name}`{'' if default in ('none', 'off') else f' {default}'} | {meaning} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(flags_markdown(), end="")
