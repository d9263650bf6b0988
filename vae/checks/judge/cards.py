"""Judges the cards and their driver, from facts only."""

from vae.checks import cuda_builds, remedies
from vae.checks.facts import Facts, SmiCard
from vae.checks.results import FAIL, PASS, SKIP, WARN, Case, Check, check
from vae.system.gpu_memory import ALLOCATOR_VARIABLES, GROWING_SEGMENTS, growing_segments_supported
from vae.system.gpus import BF16_CAPABILITY, match_card
from vae.system.host import GIB

HIDING = ("", "-1", "nodevfiles")  # values of CUDA_VISIBLE_DEVICES that hide every card
MAX_USED_SHARE = 0.1  # share of a card's memory that other programs may use before a warning
# NVML's nvmlClocksEventReasons that indicate a problem; idling and the power cap under load do not.
CLOCK_REASONS = {
    0x08: "hardware slowdown (heat or power)",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake of the power supply",
}


def judge_cards(facts: Facts) -> list[Check]:
    visible, driver = _visible(facts), _driver(facts)
    memory, *states = _states(facts.smi.cards)
    return [
        _present(facts),
        visible,
        driver,
        _usable(facts, visible, driver),
        _architecture(facts),
        _bf16(facts),
        *_kinds(facts),
        memory,
        _segments(facts),
        *states,
    ]


def _present(facts: Facts) -> Check:
    """Whether there is a card and its driver answers."""
    smi, update = facts.smi, remedies.update_driver(facts)
    names, message = ", ".join(card.name for card in smi.cards or facts.devices), f"nvidia-smi: {smi.message}"
    restart = f"restart the machine; if that does not help: {update}"
    note = "" if facts.torch_files.hip else "; nvidia-smi is missing, so its state is unknown"
    why = "no nvidia-smi" if smi.status == "missing" else "the driver lists no card"
    on_cpu = f"no NVIDIA card ({why}): training runs on the CPU, which is only fast enough for trials"
    hint = "" if facts.host.system == "Darwin" else f"if the machine has a card: {update}"
    hanging, status = smi.status == "hanging", WARN if facts.devices else FAIL
    cases = [
        (smi.status == "answered" and smi.cards, PASS, names),
        # waking a card may take longer
        (hanging and facts.quick, WARN, message, "run the check without --quick, which waits longer"),
        (hanging or smi.status == "failed", status, message, restart),
        (facts.devices, PASS, names + note),  # PyTorch finds the card although nvidia-smi is missing
        (True, WARN, on_cpu, hint),
    ]
    return check("card.present", "Card", "an NVIDIA card whose driver answers nvidia-smi", cases)


def _visible(facts: Facts) -> Check:
    value = facts.host.variables.get("CUDA_VISIBLE_DEVICES")
    unset = "set CUDA_VISIBLE_DEVICES=" if facts.on_windows else "unset CUDA_VISIBLE_DEVICES"
    cases = [
        (value is None, SKIP, "not set: every card can be used"),
        (str(value).strip().lower() not in HIDING, PASS, f"{value!r}: only these cards are used", "", ""),
        (True, WARN, f"{value!r} hides every card", unset),
    ]
    return check("card.visible", "CUDA_VISIBLE_DEVICES", "not set, or card numbers", cases)


def _driver(facts: Facts) -> Check:
    """Whether the driver is new enough for PyTorch's CUDA version and for the card."""
    cuda, driver = facts.torch_files.cuda, facts.smi.driver or ""
    capability = next((capability for _, capability in facts.capabilities), None)
    needed, branch = cuda_builds.needed_branch(cuda, capability), cuda_builds.driver_branch(driver)
    reasons = [f"CUDA {cuda} needs {cuda_builds.needed_branch(cuda, None)}"] if cuda else []
    if capability and capability >= cuda_builds.BLACKWELL:
        reasons.append(f"RTX 50 and B200 need {cuda_builds.BLACKWELL_DRIVER}")
    remedy, older = remedies.update_driver(facts, needed), remedies.suggested(facts)
    if older:
        remedy += f"; or install the build for this driver: {remedies.setup(facts, older)}"
    expected = f"{needed} or newer: {', '.join(reasons)}" if needed else "any: this build has no CUDA"
    cases = [
        (not driver, SKIP, "the driver version is unknown"),
        (branch is None or branch >= needed, PASS, driver),
        (True, FAIL, f"{driver}: too old", remedy),
    ]
    return check("card.driver", "Driver", expected, cases)


def _usable(facts: Facts, visible: Check, driver: Check) -> Check:
    """Whether PyTorch can use the card."""
    loaded, devices = facts.loaded, facts.devices
    sizes = "; ".join(f"{card.name}, {card.memory_total / GIB:.1f} GiB" for card in devices)
    no_cuda = "this build of PyTorch has no CUDA (see Build of PyTorch)"
    remedy = driver.remedy or "restart the machine; start a container with --gpus all"
    if loaded is None or loaded.error:
        cases: list[Case] = [(True, SKIP, "PyTorch does not load")]
    else:
        ended, hung = f"looking for cards: {loaded.ended}", loaded.unfinished == "looking for cards"
        cases = [
            (devices, PASS, sizes),
            (hung, FAIL, ended, "restart the machine"),
            (not facts.smi.cards, SKIP, "there is no card"),
            (not facts.torch_files.cuda, SKIP, no_cuda),
            (visible.status == WARN, WARN, "CUDA_VISIBLE_DEVICES hides it", visible.remedy),
            (True, FAIL, loaded.cuda_message or "no, without an error message", remedy),
        ]
    return check("card.usable", "Usable by PyTorch", "torch.cuda.is_available()", cases)


def _architecture(facts: Facts) -> Check:
    """Whether the build has code for the card; if not, every kernel fails with `no kernel image`."""
    arch_list, cards = facts.loaded.arch_list if facts.loaded else (), facts.capabilities
    names = [(name, f"sm_{major}{minor}") for name, (major, minor) in cards]
    runs = [cuda_builds.runs_on(capability, arch_list) for _, capability in cards]
    unsupported = [f"{name} ({sm})" for (name, sm), fine in zip(names, runs, strict=True) if not fine]
    found = f"none for {', '.join(unsupported)}: only {' '.join(arch_list)}"
    numbers = ",".join(str(index) for index, supported in enumerate(runs) if supported)
    hide = remedies.set_variable(facts, "CUDA_VISIBLE_DEVICES", numbers)
    unknown = not arch_list or not cards or facts.torch_files.hip
    cases = [
        (not facts.loaded, SKIP, "PyTorch does not load"),
        (unknown, SKIP, "no card" if arch_list else "this build has no CUDA"),
        (all(runs), PASS, " ".join(arch_list)),
        (runs[:1] == [True], WARN, found, hide),  # training uses the first card by default
        (True, FAIL, found, remedies.suitable_build(facts)),
    ]
    return check(
        "torch.architectures", "Code for the card", ", ".join(sorted({sm for _, sm in names})), cases
    )


def _bf16(facts: Facts) -> Check:
    cards, cpu = facts.capabilities, facts.loaded.cpu_bf16 if facts.loaded else None
    old = ", ".join(name for name, capability in cards if capability < BF16_CAPABILITY)
    use_fp16 = "train with --mixed_precision without --use_bf16: it uses fp16 there"
    cpu_only = "no bf16 instructions in the CPU: --mixed_precision uses fp32"
    cases = [
        (old, WARN, f"{old} computes bf16 slowly or not at all", use_fp16),
        (cards, PASS, "in hardware"),
        (cpu is None, SKIP, "no card"),
        (cpu == "native", PASS, "in hardware, on the CPU: --mixed_precision uses bf16", "", ""),
        (True, PASS, cpu_only, "", ""),
    ]
    return check("card.bf16", "bf16", "compute capability 8.0 or newer (RTX 30)", cases)


def _kinds(facts: Facts) -> list[Check]:
    """Whether several cards are identical, and which settings of speed the first one has."""
    names = [card.name for card in facts.devices or facts.smi.cards]
    found = f"{', '.join(names)}: training uses the first; together they run at the speed of the slowest"
    choose = f"to choose one: {remedies.set_variable(facts, 'CUDA_DEVICE_ORDER', 'PCI_BUS_ID')}, then "
    choose += f"{remedies.set_variable(facts, 'CUDA_VISIBLE_DEVICES', '0')} with its number in nvidia-smi"
    same = [
        (len(names) < 2, SKIP, "one card or none"),
        (len(set(names)) == 1, PASS, f"{len(names)} x {names[0] if names else ''}"),
        (True, WARN, found, choose),
    ]
    sizes = [(card.name, card.memory_total / GIB) for card in facts.devices]
    sizes = sizes or [(c.name, c.memory_total_mib / 1024) for c in facts.smi.cards if c.memory_total_mib]
    name, gib = sizes[0] if sizes else ("", 0.0)
    known = match_card(name, gib)
    settings = [
        (not sizes, SKIP, "no card"),
        (known and known.settings, PASS, f"those of the {known and known.name}"),
        (True, PASS, f"{name} has none of its own: based on its {gib:.1f} GiB"),
    ]
    return [
        check("card.same", "Identical cards", "identical cards", same),
        check("card.profile", "Speed settings", "", settings),
    ]


def _segments(facts: Facts) -> Check:
    """Whether PyTorch allocates memory in segments that grow, which the memory plan assumes."""
    host, growing = facts.host, facts.loaded.growing_segments if facts.loaded else None
    cost = "PyTorch reserves up to a sixth more memory, and images of 4096 px do not fit 32 GB"
    system = "Windows" if facts.on_windows else "WSL"
    own = {name: host.variables[name] for name in ALLOCATOR_VARIABLES if name in host.variables}
    name, value = next(iter(own.items()), (ALLOCATOR_VARIABLES[0], "not set"))
    supported = growing_segments_supported(host.system, host.release)
    unsupported = f"they do not grow: PyTorch does not support that on {system}; {cost}"
    refused, update = f"the driver refuses segments that grow: {cost}", remedies.update_driver(facts)
    cases = [
        (growing is None, SKIP, "no card, or PyTorch did not get as far"),
        (growing, PASS, "they grow"),
        (not supported, PASS, unsupported, "", ""),
        (GROWING_SEGMENTS in own.values(), WARN, refused, update),
        (True, WARN, f"they do not grow ({name}: {value}): {cost}", f"unset {' '.join(own) or name}"),
    ]
    return check("card.segments", "Memory segments", GROWING_SEGMENTS, cases)


def _states(cards: tuple[SmiCard, ...]) -> list[Check]:
    """What nvidia-smi reports, one check over all cards: the worst status and the finding of every card."""
    lanes = "all lanes; the generation drops while the card idles"
    rows = (
        ("card.memory", "Memory in use", "at most a tenth", _memory),
        ("card.pcie", "PCIe", lanes, _pcie),
        ("card.power", "Power", "information only", _power),
        ("card.clocks", "Clocks", "no slowdown", _clocks),
        ("card.temperature", "Temperature", "information only: see Clocks", _temperature),
    )
    checks = []
    for id, title, expected, judge_card in rows:
        known = [(card.index, case) for card in cards if (case := judge_card(card))]
        worst = next((case for _, case in known if case[0] == WARN), known[0][1] if known else ("", "", ""))
        several = len(cards) > 1
        found = "; ".join(f"{index}: {case[1]}" if several else case[1] for index, case in known)
        cases = [
            (not cards, SKIP, "nvidia-smi lists no card"),
            (not known, SKIP, "not reported by this card"),
            (True, worst[0], found, worst[2]),
        ]
        checks.append(check(id, title, expected, cases))
    return checks


# One card -> its status, finding and remedy; None if the value is unknown.


def _memory(card: SmiCard) -> tuple[str, str, str] | None:
    if card.memory_used_mib is None or not card.memory_total_mib:
        return None
    found = f"{card.memory_used_mib / 1024:.1f} of {card.memory_total_mib / 1024:.1f} GiB in use"
    if card.memory_used_mib <= MAX_USED_SHARE * card.memory_total_mib:
        return PASS, found, ""
    return WARN, f"{found} by other programs", "end the processes that you do not need: nvidia-smi lists them"


def _pcie(card: SmiCard) -> tuple[str, str, str] | None:
    if not (card.pcie_width and card.pcie_width_max):
        return None
    generation = f"generation {card.pcie_generation} of {card.pcie_generation_max}"
    found = f"x{card.pcie_width} of x{card.pcie_width_max}, {generation} now"
    if card.pcie_width >= card.pcie_width_max:
        return PASS, found, ""
    return WARN, found, "use the mainboard's x16 slot, and check for other slots that share its lanes"


def _power(card: SmiCard) -> tuple[str, str, str] | None:
    watts = {
        "limit": card.power_limit_w,
        "default": card.power_default_w,
        "drawing": card.power_draw_w,
    }
    found = ", ".join(f"{name} {value:.0f} W" for name, value in watts.items() if value is not None)
    if card.power_limit_w is None:
        return None
    return PASS, found + (" now" if card.power_draw_w is not None else ""), ""  # the owner's choice


def _clocks(card: SmiCard) -> tuple[str, str, str] | None:
    if card.clock_reasons is None:
        return None
    reasons = ", ".join(text for bit, text in CLOCK_REASONS.items() if card.clock_reasons & bit)
    remedy = "check fans, case airflow and power cables; nvidia-smi -q -d PERFORMANCE shows the reasons"
    return (WARN, reasons, remedy) if reasons else (PASS, "not reduced", "")


def _temperature(card: SmiCard) -> tuple[str, str, str] | None:
    return None if card.temperature_c is None else (PASS, f"{card.temperature_c} C now", "")
