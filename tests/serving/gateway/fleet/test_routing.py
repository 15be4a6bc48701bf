"""Routing as pure functions: balance, agreement of gateways, and little movement when servers come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from builder.serving.gateway.fleet.holders import ModelHolders
from builder.serving.gateway.fleet.routing import BALANCE, BATCHED_TOKENS, by_prefix, least_loaded, load_of
from builder.serving.gateway.fleet.slowness import MAX_RATIO, MIN_SLOWNESS, SlownessMeter, UsualPaces
from builder.serving.gateway.fleet.versions import holders_of, serving_version


@dataclass
class Server:
    name: str
    work: int = 0
    requests: int = 0
    slowness: float = 1.0


def _servers(loads: Sequence[int], slowness: Sequence[float] = ()) -> list[Server]:
    times = [*slowness, *[1.0] * len(loads)]
    return [Server(f"10.0.0.{number}:8001", load, load // 100, times[number]) for number, load in enumerate(loads)]


LOADS = st.lists(st.integers(0, 20_000), min_size=1, max_size=12)
KEYS = st.binary(min_size=1, max_size=40)


@given(LOADS, st.lists(st.floats(1.0, MAX_RATIO), max_size=12), st.integers(1, 1000), st.integers(0, 1000))
def test_least_loaded_has_nearly_the_least_load(
    loads: list[int], slowness: list[float], tokens: int, seed: int
) -> None:
    servers = _servers(loads, slowness)
    chosen = least_loaded(tokens, servers, Random(seed))
    assert load_of(chosen, tokens) <= BALANCE * min(load_of(server, tokens) for server in servers)


def test_least_loaded_prefers_fewer_requests_among_equals() -> None:
    servers = [Server("a", 10, requests=3), Server("b", 10, requests=1), Server("c", 30)]
    assert {least_loaded(10, servers, Random(seed)).name for seed in range(20)} == {"b"}


def test_slow_server_gets_less_work() -> None:
    """Regression: a server that took ten times as long got as many tokens as the others, and the requests of all."""
    slow, *others = servers = _servers([0] * 3, [10.0])
    for seed in range(600):
        least_loaded(100, servers, Random(seed)).work += 100
    assert slow.work < 1.5 * others[0].work / 10
    slow, *others = servers = _servers([0] * 3, [10.0])
    for _ in range(600):
        by_prefix(b"museum", 100, servers).work += 100
    assert slow.work < others[0].work / 2


def test_slowness_follows_the_last_answers() -> None:
    meter = SlownessMeter()
    for _ in range(20):
        meter.record(3.0)
    assert 2.9 < meter.slowness < 3.0
    for _ in range(30):
        meter.forget()
    assert meter.slowness == 1.0, "a server without requests counts as usual again"
    meter.record(1e6)
    assert MIN_SLOWNESS < meter.slowness < MAX_RATIO
    lucky = SlownessMeter()
    lucky.record(0.1)
    assert lucky.slowness == 1.0


def test_usual_pace_is_that_of_all_servers() -> None:
    usual = UsualPaces()
    assert usual.ratio("a", "1", 100, 1.0) == 1.0, "nothing is known before"
    assert usual.ratio("a", "1", 100, 2.0) == 2.0
    assert usual.ratio("b", "1", 100, 99.0) == usual.ratio("a", "2", 100, 99.0) == 1.0
    for _ in range(200):
        usual.ratio("a", "1", 100, 2.0)
    assert abs(usual.ratio("a", "1", 100, 2.0) - 1.0) < 0.01
    assert usual.ratio("c", "1", 1, 0.0) == usual.ratio("c", "1", 1, 0.0) == 1.0, "a clock may not advance"
    usual.keep_only({"a"})
    assert set(usual.models) == {"a"}


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_length_of_a_request_makes_no_server_slow(call: int, token: int, seed: int) -> None:
    """Regression: short texts took several times the usual time per token, since each call costs a fixed time too."""
    usual, meter, random = UsualPaces(), SlownessMeter(), Random(seed)
    for _ in range(300):
        tokens = random.randint(2, 512)
        meter.record(usual.ratio("a", "1", tokens, call + token * tokens))
        assert meter.slowness == 1.0


@given(LOADS, KEYS, st.integers(1, 5000))
def test_prefix_never_goes_to_a_server_above_its_share(loads: list[int], key: bytes, tokens: int) -> None:
    limit = BALANCE * (sum(loads) + tokens) / len(loads) + max(BATCHED_TOKENS, tokens)
    assert by_prefix(key, tokens, _servers(loads)).work + tokens <= limit


@given(LOADS, st.lists(st.floats(1.0, MAX_RATIO), max_size=12), KEYS)
def test_prefix_goes_to_an_idle_server_unless_it_is_slow(loads: list[int], slowness: list[float], key: bytes) -> None:
    servers = _servers([0] * len(loads), slowness)
    first = by_prefix(key, 100, _servers([0] * len(loads)))
    (same,) = [server for server in servers if server.name == first.name]
    chosen = by_prefix(key, 100, servers)
    assert chosen is same or same.slowness > 2
    assert chosen.slowness <= max(2.2, min(server.slowness for server in servers))


@given(st.lists(st.tuples(KEYS, st.integers(1, 4000)), min_size=1, max_size=200), st.integers(1, 10))
def test_work_by_prefix_is_bounded(requests: list[tuple[bytes, int]], count: int) -> None:
    """However many prompts begin alike: no server has more than its share, a batch, and the last request."""
    servers = _servers([0] * count)
    for key, work in requests:
        by_prefix(key, work, servers).work += work
    total, largest = sum(work for _, work in requests), max(work for _, work in requests)
    assert max(server.work for server in servers) <= BALANCE * total / count + BATCHED_TOKENS + largest


@given(LOADS, KEYS, st.randoms(use_true_random=False))
def test_gateways_agree_in_any_order(loads: list[int], key: bytes, random: Random) -> None:
    """A second gateway lists the servers in another order, and knows other small amounts of work."""
    servers = _servers([load % BATCHED_TOKENS for load in loads])
    others = _servers([(7 * load) % BATCHED_TOKENS for load in loads])
    random.shuffle(others)
    assert by_prefix(key, 100, servers).name == by_prefix(key, 100, others).name


@given(st.integers(2, 12), st.integers(0, 11))
def test_server_that_leaves_moves_only_its_keys(count: int, leaving: int) -> None:
    servers = _servers([0] * count)
    left = [server for server in servers if server is not servers[leaving % count]]
    keys = [f"key {number}".encode() for number in range(100)]
    for key in keys:
        before = by_prefix(key, 100, servers)
        if before in left:
            assert by_prefix(key, 100, left) is before


def test_keys_are_spread_evenly() -> None:
    servers = _servers([0] * 10)
    counts = Counter(by_prefix(f"key {number}".encode(), 100, servers).name for number in range(5000))
    assert len(counts) == 10
    assert max(counts.values()) < 1.2 * 500


@dataclass(frozen=True)
class Loaded:
    versions: dict[str, tuple[str, ...]]


def test_version_is_that_of_most_servers_and_the_newest_of_equals() -> None:
    assert serving_version([("1",), ("1",), ("2",)]) == "1"
    assert serving_version([("9",), ("10",)]) == "10"
    assert serving_version([("1", "2"), ("2",)]) == "2"
    assert serving_version([]) == ""


def test_retry_keeps_its_version_while_a_server_has_it() -> None:
    servers = [Loaded({"a": ("1",)}), Loaded({"a": ("2",)}), Loaded({"a": ("2",)}), Loaded({})]
    assert holders_of(servers, "a") == ("2", servers[1:3])
    assert holders_of(servers, "a", before="1") == ("1", servers[:1])
    assert holders_of(servers, "a", before="3") == ("2", servers[1:3])
    assert holders_of(servers, "a", requested="3") == ("3", [])


@given(st.lists(st.tuples(st.integers(0, 3), st.frozensets(st.sampled_from("abc"))), max_size=20))
def test_holders_are_the_servers_that_loaded_a_model_last(changes: list[tuple[int, frozenset[str]]]) -> None:
    holders, loaded = ModelHolders[int](), dict[int, frozenset[str]]()
    for server, models in changes:
        holders.change(server, loaded.get(server, frozenset()), models)
        loaded[server] = models
    for model in "abc":
        assert set(holders.of(model)) == {server for server, models in loaded.items() if model in models}
    assert set(holders.servers) == set().union(*loaded.values()), "models that no server has are forgotten"
