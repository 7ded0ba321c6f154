"""The tables themselves: no rule asks for what its pattern does not give, no two overlap."""

import re

import pytest

from lydite.weights.maps import features, flux, mmdit, text, unet, vae
from lydite.weights.rules import Alias, Drop, Join, Rename, Rule, Split, resolve

TABLES = {
    "flux original": flux.ORIGINAL,
    "mmdit diffusers": mmdit.DIFFUSERS,
    "mmdit original": mmdit.original(3),
    "unet diffusers": unet.DIFFUSERS,
    "unet original": unet.original(2, (False, True, True), (True, True, False)),
    "vae diffusers": vae.DIFFUSERS,
    "vae original": vae.original(4),
    "clip": text.CLIP,
    "clip-l original": text.CLIP_L_ORIGINAL,
    "openclip": text.openclip(3, projected=False),
    "openclip projected": text.openclip(3, projected=True),
    "t5": text.T5,
    "qwen2.5-vl": text.QWEN2_5_VL,
    "qwen3": text.QWEN3,
    "vae qwen-image": vae.QWEN_IMAGE,
    "inception": features.INCEPTION,
    "lpips backbone": features.LPIPS_BACKBONE,
    "lpips heads": features.LPIPS_HEADS,
    "clip with both towers": features.CLIP,
}
TABLE = pytest.mark.parametrize("table", TABLES)


def sources(rule: Rule) -> tuple[str, ...]:
    if isinstance(rule, Join):
        return rule.sources
    return (rule.source,) if isinstance(rule, Rename | Alias | Split | Drop) else ()


@TABLE
def test_source_and_target_have_the_same_slots(table: str) -> None:
    slots = re.compile(r"\{\w+\}").findall
    for rule in TABLES[table]:
        if isinstance(rule, Rename | Alias | Join):
            assert all(set(slots(each)) == set(slots(rule.target)) for each in sources(rule)), rule
        if isinstance(rule, Split):
            assert all(set(slots(each)) == set(slots(rule.source)) for each in rule.targets), rule


@TABLE
def test_an_ordinary_name_of_each_rule_is_claimed_by_no_other(table: str) -> None:
    words = {"i": "2", "j": "1", "p": "encoder", "q": "weight"}
    rules = TABLES[table]
    for rule in rules:
        for pattern in sources(rule):
            name = re.sub(r"\{(\w+)\}", lambda slot: words[slot[1]], pattern)
            assert name not in resolve([name], rules).surplus, rule


@TABLE
def test_what_is_dropped_or_filled_has_its_reason(table: str) -> None:
    for rule in TABLES[table]:
        assert len(getattr(rule, "because", "a reason in words")) > 10
