"""Judges the cards and their driver: facts in, checks out, nothing is touched."""

from collections.abc import Callable

from vae.checks import cuda_builds, remedies
from vae.checks.facts import Facts, SmiCard
from vae.checks.results import FAIL, PASS, SKIP, WARN, Check
from vae.gpus import BF16_CAPABILITY, match_card
from vae.host import GIB

HIDING = ("", "-1", "nodevfiles")  # values of CUDA_VISIBLE_DEVICES that hide every card
MUCH_TAKEN = 0.1  # share of a card's memory that others may hold before it is said
# NVML's nvmlClocksEventReasons that mean trouble; idling and the power cap under load do not.
CLOCK_REASONS = {
    0x08: "hardware slowdown (heat or power)",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake of the power supply",
}


def judge_cards(facts: Facts) -> list[Check]:
    return [
        _present(facts),
        _visible(facts),
        _driver(facts),
        _usable(facts),
        _architecture(facts),
        _bf16(facts),
        _same(facts),
        _profile(facts),
        _memory(facts),
        _pcie(facts),
        _power(facts),
        _clocks(facts),
        _temperature(facts),
    ]


def _devices(facts: Facts) -> tuple:
    return facts.loaded.devices if facts.loaded else ()


def _present(facts: Facts) -> Check:
    """Is there a card, and does its driver answer."""
    check, title, smi = "card.present", "Card", facts.smi
    expected = "an NVIDIA card whose driver answers nvidia-smi"
    devices = _devices(facts)
    names = [card.name for card in smi.cards] or [card.name for card in devices]
    if smi.status == "answered" and smi.cards:
        return Check(check, title, PASS, ", ".join(names), expected)
    if smi.status == "hanging" and facts.quick:  # waking a card may take longer
        mend = "ask again without --quick, which waits longer"
        return Check(check, title, WARN, f"nvidia-smi: {smi.message}", expected, mend)
    if smi.status in ("hanging", "failed"):
        restart = "restart the machine; if it stays: " + remedies.update_driver(facts)
        return Check(check, title, WARN if devices else FAIL, f"nvidia-smi: {smi.message}", expected, restart)
    if devices:  # PyTorch finds what nvidia-smi, which is missing, cannot describe
        note = "" if facts.torch_files.hip else "; nvidia-smi is missing, so its state is unknown"
        return Check(check, title, PASS, ", ".join(names) + note, expected)
    why = "no nvidia-smi" if smi.status == "missing" else "the driver lists no card"
    found = f"no NVIDIA card ({why}): training runs on the CPU, which is good for trials only"
    mac = facts.host.system == "Darwin"
    mend = "" if mac else f"with a card: {remedies.update_driver(facts)}"
    return Check(check, title, WARN, found, expected, mend)


def _visible(facts: Facts) -> Check:
    check, title = "card.visible", "CUDA_VISIBLE_DEVICES"
    value = facts.host.variables.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return Check(check, title, SKIP, "not set: every card can be used")
    if value.strip().lower() not in HIDING:
        return Check(check, title, PASS, f"{value!r}: only these cards are used")
    mend = "set CUDA_VISIBLE_DEVICES=" if remedies.on_windows(facts) else "unset CUDA_VISIBLE_DEVICES"
    return Check(check, title, WARN, f"{value!r} hides every card", "not set, or card numbers", mend)


def _hidden(facts: Facts) -> bool:
    return _visible(facts).status == WARN


def _driver(facts: Facts) -> Check:
    """The driver against the CUDA that PyTorch was built with, and against the card."""
    check, title = "card.driver", "Driver"
    if not facts.smi.driver:
        return Check(check, title, SKIP, "no driver version is known")
    cuda, capability = facts.torch_files.cuda, remedies.first_capability(facts)
    needed = cuda_builds.needed_branch(cuda, capability)
    branch = cuda_builds.driver_branch(facts.smi.driver)
    reasons = [f"CUDA {cuda} needs {cuda_builds.needed_branch(cuda, None)}"] if cuda else []
    if capability and capability >= cuda_builds.BLACKWELL:
        reasons.append(f"RTX 50 and B200 {cuda_builds.BLACKWELL_DRIVER}")
    expected = f"{needed} or newer: {', '.join(reasons)}" if needed else "any: this build has no CUDA"
    if branch is None or branch >= needed:
        return Check(check, title, PASS, facts.smi.driver, expected)
    mend = remedies.update_driver(facts, needed)
    older = remedies.suggested(facts)
    if older:
        mend += f"; or take the build for this driver: {remedies.setup(facts, older)}"
    return Check(check, title, FAIL, f"{facts.smi.driver}: too old", expected, mend)


def _usable(facts: Facts) -> Check:
    """Does PyTorch see the card that is there."""
    check, title, expected = "card.usable", "PyTorch sees it", "torch.cuda.is_available()"
    loaded = facts.loaded
    if loaded is None or loaded.error:
        return Check(check, title, SKIP, "PyTorch does not load")
    if loaded.devices:
        sizes = [f"{card.name}, {card.memory_total / GIB:.1f} GiB" for card in loaded.devices]
        return Check(check, title, PASS, "; ".join(sizes), expected)
    if loaded.unfinished == "looking for cards":
        mend = "restart the machine"
        return Check(check, title, FAIL, f"looking for cards: {loaded.ended}", expected, mend)
    if not facts.smi.cards:
        return Check(check, title, SKIP, "there is no card")
    if not facts.torch_files.cuda:
        return Check(check, title, SKIP, "this build of PyTorch has no CUDA (see Build of PyTorch)")
    if _hidden(facts):
        return Check(check, title, WARN, "CUDA_VISIBLE_DEVICES hides it", expected, _visible(facts).mend)
    driver = _driver(facts)
    restart = "restart the machine; start a container with --gpus all"
    mend = driver.mend if driver.status == FAIL else restart
    return Check(check, title, FAIL, loaded.cuda_message or "no, and it does not say why", expected, mend)


def _architecture(facts: Facts) -> Check:
    """Whether the build has code for the card: without it every kernel fails with `no kernel image`."""
    check, title = "torch.architectures", "Code for the card"
    arch_list = facts.loaded.arch_list if facts.loaded else ()
    cards = remedies.capabilities(facts)
    if not arch_list or not cards or facts.torch_files.hip:
        why = (
            "no card" if arch_list else "this build has no CUDA" if facts.loaded else "PyTorch does not load"
        )
        return Check(check, title, SKIP, why)
    lacking = [
        (name, major, minor)
        for name, (major, minor) in cards
        if not cuda_builds.runs_on((major, minor), arch_list)
    ]
    expected = ", ".join(sorted({f"sm_{major}{minor}" for _, (major, minor) in cards}))
    if not lacking:
        return Check(check, title, PASS, " ".join(arch_list), expected)
    named = ", ".join(f"{name} (sm_{major}{minor})" for name, major, minor in lacking)
    found = f"none for {named}: only {' '.join(arch_list)}"
    if cuda_builds.runs_on(cards[0][1], arch_list):  # the one that training takes by itself is fine
        fine = [i for i, (_, c) in enumerate(cards) if cuda_builds.runs_on(c, arch_list)]
        mend = remedies.variable(facts, "CUDA_VISIBLE_DEVICES", ",".join(map(str, fine)))
        return Check(check, title, WARN, found, expected, mend)
    mend = remedies.suiting_build(facts)
    return Check(check, title, FAIL, found, expected, mend)


def _bf16(facts: Facts) -> Check:
    check, title, expected = "card.bf16", "bf16", "compute capability 8.0 or newer (RTX 30)"
    cards = remedies.capabilities(facts)
    if not cards:
        return Check(check, title, SKIP, "no card")
    old = [name for name, capability in cards if capability < BF16_CAPABILITY]
    if not old:
        return Check(check, title, PASS, "in hardware", expected)
    found = f"{', '.join(old)} computes it slowly or not at all"
    return Check(
        check, title, WARN, found, expected, "train with --mixed_precision alone: it takes fp16 there"
    )


def _same(facts: Facts) -> Check:
    check, title = "card.same", "Cards alike"
    names = [c.name for c in _devices(facts)] or [c.name for c in facts.smi.cards]
    if len(names) < 2:
        return Check(check, title, SKIP, "one card or none")
    if len(set(names)) == 1:
        return Check(check, title, PASS, f"{len(names)} x {names[0]}", "equal cards")
    found = ", ".join(names) + ": training takes the first; together they go at the slowest one's pace"
    mend = f"to choose one: {remedies.variable(facts, 'CUDA_DEVICE_ORDER', 'PCI_BUS_ID')}, then "
    mend += f"{remedies.variable(facts, 'CUDA_VISIBLE_DEVICES', '0')} with its number in nvidia-smi"
    return Check(check, title, WARN, found, "equal cards", mend)


def _profile(facts: Facts) -> Check:
    check, title = "card.profile", "Speed settings"
    sizes = [(card.name, card.memory_total / GIB) for card in _devices(facts)]
    sizes = sizes or [(c.name, c.memory_total_mib / 1024) for c in facts.smi.cards if c.memory_total_mib]
    if not sizes:
        return Check(check, title, SKIP, "no card")
    name, gib = sizes[0]
    known = match_card(name, gib)
    found = f"those of the {known.name}" if known else f"{name} has no profile: taken from its {gib:.1f} GiB"
    return Check(check, title, PASS, found)


# --- what nvidia-smi says of each card --------------------------------------------------------------------


def _each(facts: Facts, check: str, title: str, expected: str, judge: Callable[[SmiCard], tuple | None]):
    """One check over all cards: `judge` gives (status, found, mend) for one, None where it is not known."""
    if not facts.smi.cards:
        return Check(check, title, SKIP, "nvidia-smi describes no card")
    verdicts = [(card, judge(card)) for card in facts.smi.cards]
    known = [(card, verdict) for card, verdict in verdicts if verdict]
    if not known:
        return Check(check, title, SKIP, "this card does not tell")
    statuses = [verdict[0] for _, verdict in known]
    status = next(s for s in (FAIL, WARN, PASS) if s in statuses)
    several = len(facts.smi.cards) > 1
    found = "; ".join(f"{card.index}: {v[1]}" if several else v[1] for card, v in known)
    mend = next((verdict[2] for _, verdict in known if verdict[0] == status), "")
    return Check(check, title, status, found, expected, mend)


def _memory(facts: Facts) -> Check:
    def judge(card: SmiCard):
        if card.memory_used_mib is None or not card.memory_total_mib:
            return None
        used, total = card.memory_used_mib / 1024, card.memory_total_mib / 1024
        found = f"{used:.1f} of {total:.1f} GiB taken"
        if used <= MUCH_TAKEN * total:
            return PASS, found, ""
        return WARN, f"{found} by others", "nvidia-smi names the processes: end those you do not need"

    return _each(facts, "card.memory", "Memory taken", "at most a tenth", judge)


def _pcie(facts: Facts) -> Check:
    def judge(card: SmiCard):
        if not (card.pcie_width and card.pcie_width_most):
            return None
        generation = f"generation {card.pcie_generation} of {card.pcie_generation_most}"
        found = f"x{card.pcie_width} of x{card.pcie_width_most}, {generation} now"
        if card.pcie_width >= card.pcie_width_most:
            return PASS, found, ""
        return (
            WARN,
            found,
            "seat the card in the mainboard's x16 slot; look at slots that share lanes with it",
        )

    return _each(facts, "card.pcie", "PCIe", "all lanes; the generation drops while the card idles", judge)


def _power(facts: Facts) -> Check:
    def judge(card: SmiCard):
        if card.power_limit is None:
            return None
        found = f"limit {card.power_limit:.0f} W"
        if card.power_default is not None:
            found += f" of {card.power_default:.0f} W by default"
        if card.power_draw is not None:
            found += f", drawing {card.power_draw:.0f} W now"
        return PASS, found, ""  # a lower limit is its owner's choice

    return _each(facts, "card.power", "Power", "shown only", judge)


def _clocks(facts: Facts) -> Check:
    def judge(card: SmiCard):
        if card.clock_reasons is None:
            return None
        reasons = [text for bit, text in CLOCK_REASONS.items() if card.clock_reasons & bit]
        if not reasons:
            return PASS, "nothing holds them back", ""
        mend = (
            "look at the fans, the case's air and the power cables; nvidia-smi -q -d PERFORMANCE watches it"
        )
        return WARN, ", ".join(reasons), mend

    return _each(facts, "card.clocks", "Clocks", "no slowdown", judge)


def _temperature(facts: Facts) -> Check:
    def judge(card: SmiCard):
        return None if card.temperature_c is None else (PASS, f"{card.temperature_c} C now", "")

    return _each(facts, "card.temperature", "Temperature", "shown only: see Clocks", judge)
