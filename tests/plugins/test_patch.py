"""A patch replaces all of its symbols once, or none."""

import sys
from types import ModuleType

import pytest

from primeblocks.errors import UnsupportedError
from primeblocks.plugins.patch import Patch, ours

HOST = "primeblocks_test_host"


class Engine:
    def step(self) -> str:
        return "stock"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(HOST)
    module.Engine = type("Engine", (Engine,), {"step": Engine.step})  # type: ignore[attr-defined]
    module.limit = lambda: 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, HOST, module)
    return module


def louder(original):
    return lambda *args: f"{original(*args)} and ours"


def patch(*symbols: str, name: str = "louder") -> Patch:
    return Patch(
        name=name,
        reason="a test",
        tested="host==1.*",
        replacements={f"{HOST}:{symbol}": louder for symbol in symbols},
        asked=bool,
    )


def test_all_symbols_are_replaced_once(host):
    both = patch("Engine.step", "limit")
    assert not both.applied()
    both.apply()
    both.apply()
    assert both.applied()
    assert host.Engine().step() == "stock and ours"
    assert host.limit() == "1 and ours"


def test_the_stock_symbol_stays_reachable(host):
    original = host.Engine.step
    patch("Engine.step").apply()
    found = ours(f"{HOST}:Engine.step")
    assert found is host.Engine.step
    assert found.primeblocks_stock is original


@pytest.mark.parametrize("symbol", ["Engine.gone", "Gone.step", "gone"])
def test_a_missing_symbol_leaves_every_other_alone(host, symbol):
    incomplete = patch("limit", symbol)
    with pytest.raises(
        UnsupportedError, match=rf"louder .* {HOST}:{symbol} is missing.*host==1\.\*"
    ):
        incomplete.apply()
    assert host.limit() == 1
    assert not incomplete.applied()


def test_a_missing_module_is_a_missing_symbol(host):
    absent = Patch("absent", "a test", "host==1.*", {f"{HOST}_2:f": louder}, bool)
    with pytest.raises(UnsupportedError, match=f"{HOST}_2:f is missing"):
        absent.apply()
    assert not absent.applied()


def test_patches_of_one_symbol_lie_over_each_other(host):
    first, second = (patch("limit", name=name) for name in ("first", "second"))
    original = host.limit
    first.apply()
    assert not second.applied()
    for each in (second, first, second):
        each.apply()
    assert host.limit() == "1 and ours and ours"
    assert first.applied()
    assert second.applied()
    assert ours(f"{HOST}:limit").primeblocks_stock.primeblocks_stock is original
