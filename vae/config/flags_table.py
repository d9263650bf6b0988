"""docs/flags.md, written from the declared options: `python -m vae.config.flags_table > docs/flags.md`."""

from dataclasses import fields

from vae.config.flags import shown_default
from vae.config.options import Config
from vae.config.recipes import profile_table


def flags_markdown() -> str:
    """The whole page: every flag with its default and meaning, then the profiles."""
    lines = [
        "# Flags of train_vae.py",
        "",
        "Made from the declarations in `vae/config/options.py` by `python -m vae.config.flags_table`.",
        "Every on/off flag also has its `--no-` form. Order: flag, JSON file, checkpoint, profile, card,"
        " default.",
    ]
    for section in fields(Config):
        lines += ["", f"## {section.name}", "", section.default_factory.__doc__.strip(), ""]
        lines += ["| flag | meaning | default |", "|---|---|---|"]
        for item in fields(section.default_factory):
            choices = item.metadata["choices"]
            meaning = item.metadata["help"] + (f" ({', '.join(choices)})" if choices else "")
            lines.append(f"| `--{item.name}` | {meaning} | {shown_default(item)} |")
    lines += ["", "## Profiles", "", "```", profile_table(), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(flags_markdown(), end="")
