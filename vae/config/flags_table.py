"""Generate docs/flags.md from the option declarations: `python -m vae.config.flags_table > docs/flags.md`."""

from dataclasses import fields

from vae.config.flags import COMMON, default_text
from vae.config.options import ActionConfig, section_title, sections


def flags_markdown() -> str:
    """The whole page: every flag with its meaning and default."""
    lines = [
        "# Flags of train_vae.py",
        "",
        "`python -m vae.config.flags_table` generates this page from `vae/config/options.py`. `--help`",
        "shows the flags in bold, `--help_all` shows all. Each is also a key of the JSON file of `--config`,",
        "except the actions. Every on/off flag also has a `--no-` form. Without a default, it is off.",
        "Precedence of sources: flag, JSON file, checkpoint, [profile](rtx5090.md#profiles), card, default.",
    ]
    for name, section in {"actions": ActionConfig, **sections()}.items():
        lines += ["", f"## {name}", "", section_title(section), ""]
        lines += ["| flag and default | meaning |", "|---|---|"]
        for item in fields(section):
            choices = item.metadata["choices"]
            meaning = item.metadata["help"] + (f" ({', '.join(choices)})" if choices else "")
            flag = f"**`--{item.name}`**" if item.name in COMMON else f"`--{item.name}`"
            default = default_text(item)
            lines.append(f"| {flag}{'' if default in ('none', 'off') else f' {default}'} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(flags_markdown(), end="")
