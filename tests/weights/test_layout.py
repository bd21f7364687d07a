"""The promises of WeightLayout."""

import json
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hwrl.comm import Pending, raw_bytes
from hwrl.errors import LayoutMismatchError, WeightsError
from hwrl.weights import BucketRing, WeightLayout, WeightSource
from hwrl.weights.buckets import Checksums, TensorReader
from hwrl.weights.destination import FlatVersion
from hwrl.weights.messages import VoteKind
from hwrl_cpu import INFO, CpuBackend

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
BUCKET_NBYTES = 2048
CPU = CpuBackend(INFO)

Named = list[tuple[str, torch.Tensor]]


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], how: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(0, 2, (*shape, 2), dtype=torch.uint8, generator=generator).to(dtype)
    if how == "strided":
        return wide[..., 0]
    whole = wide[..., 1].contiguous()
    return whole.transpose(0, -1) if how == "transposed" and len(shape) > 1 else whole


@st.composite
def _models(draw: st.DrawFn) -> Named:
    named: Named = []
    for number in range(draw(st.integers(0, 8))):
        if named and draw(st.integers(0, 4)) == 0:
            named.append((f"t{number}", draw(st.sampled_from(named))[1]))
            continue
        dtype, how = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(["plain", "strided", "transposed"]))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 3, 7, 33, 130]), max_size=2)))
        named.append((f"t{number}", _tensor(dtype, shape, how, number)))
    return named


def _reader(layout: WeightLayout, named: Named) -> TensorReader:
    return TensorReader(layout, WeightSource.of(named))


def _sent(layout: WeightLayout, named: Named) -> FlatVersion:
    """Carry every bucket as a transport would, and check its checksum on both sides."""
    buffer = BucketRing(layout, backend=CPU)
    flat = FlatVersion(layout, torch.device("cpu"))
    ours, theirs = Checksums(layout, device=torch.device("cpu")), Checksums(layout, device=torch.device("cpu"))
    reader = _reader(layout, named)
    for index in range(len(layout.buckets)):
        lease = buffer.pack(index, reader.tensors_of(layout.buckets[index]))
        ours.add(index, lease.memory)
        flat.buckets[index].copy_(lease.memory)
        theirs.add(index, flat.buckets[index])
    reader.finish()
    assert theirs.compare(ours.values).kind is VoteKind.WHOLE
    return flat


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(raw_bytes(tensor.contiguous()).numpy())


@given(_models())
@settings(max_examples=150)
def test_every_model_arrives_bit_for_bit_in_bounded_buckets_by_a_layout_of_json(named: Named) -> None:
    layout = WeightLayout.plan(named, bucket_nbytes=BUCKET_NBYTES)
    again = WeightLayout.from_json(layout.to_json())
    assert again == layout and again.hash == layout.hash
    other = WeightLayout.plan([*named, ("one more", torch.zeros(1))], bucket_nbytes=BUCKET_NBYTES)
    assert other.hash != layout.hash
    assert all(bucket.nbytes <= BUCKET_NBYTES and bucket.offset % 512 == 0 for bucket in layout.buckets)
    assert sum(piece.nbytes for bucket in layout.buckets for piece in bucket.pieces) == layout.payload_nbytes
    ends = [bucket.offset + bucket.nbytes for bucket in layout.buckets]
    assert all(end <= bucket.offset for end, bucket in zip(ends, layout.buckets[1:], strict=False))
    received = _sent(again, named).tensors
    assert list(received) == [name for name, _ in named]
    for name, tensor in named:
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
        assert _bits(received[name]) == _bits(tensor), name


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
_ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]) | _JSON,
        st.sampled_from(["float32", "bool"]) | _JSON,
        st.lists(st.integers(-1, 1 << 60), max_size=3) | _JSON,
        st.none() | st.sampled_from(["a", "b"]) | _JSON,
    ),
    max_size=3,
)


@given(
    _JSON
    | st.fixed_dictionaries(
        {
            "format": st.just(2),
            "bucket_nbytes": st.just(512) | _JSON,
            "own_nbytes": st.just(512) | _JSON,
            "alignment": st.just(16) | _JSON,
            "tensors": _ROWS,
        }
    )
)
@settings(max_examples=150)
def test_hostile_json_is_refused_or_is_a_layout(found: object) -> None:
    try:
        layout = WeightLayout.from_json(json.dumps(found))
    except LayoutMismatchError:
        return
    assert layout.nbytes <= len(layout.buckets) * layout.bucket_nbytes + 512 * len(layout.entries)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, b"\xff\xfe", '{"format":2,"bucket_nbytes":512,"tensors":[]}', "1" * 5000, "NaN"],
    ids=["empty", "cut", "deep", "binary", "newer", "long", "nan"],
)
def test_malformed_text_is_refused(text: str | bytes) -> None:
    with pytest.raises(LayoutMismatchError, match="not a weight layout"):
        WeightLayout.from_json(text)


def _tied() -> Named:
    weight = torch.arange(6.0)
    return [("embed", weight), ("other", torch.zeros(6)), ("head", weight)]


def test_a_part_of_a_storage_is_no_tie() -> None:
    weight = torch.arange(6.0)
    layout = WeightLayout.plan([("all", weight), ("half", weight[:3]), ("turned", weight.view(2, 3))])
    assert [entry.alias_of for entry in layout.entries] == [None, None, None]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda named: named[:2], "3 tensors were planned and 2 came"),
        (lambda named: [*named, ("more", torch.zeros(1))], "3 tensors were planned and more came"),
        (lambda named: [named[1], *named[1:]], "'embed' was planned here and 'other' came"),
        (lambda named: [("embed", torch.zeros(7)), *named[1:]], r"planned as torch.float32 \[6\] and came as"),
        (lambda named: [*named[:2], ("head", torch.zeros(6))], "was tied to 'embed' and no longer is"),
    ],
    ids=["fewer", "more", "name", "shape", "untied"],
)
def test_other_tensors_than_planned_are_named(change: Callable[[Named], Named], difference: str) -> None:
    named = _tied()
    layout = WeightLayout.plan(named)
    _reader(layout, named).finish()
    with pytest.raises(LayoutMismatchError, match=difference):
        _reader(layout, change(named)).finish()


@given(st.integers(1, 200_000), st.integers(0, 10**9), st.integers(1, 255))
@settings(max_examples=50)
def test_the_checksum_finds_every_changed_byte(nbytes: int, place: int, change: int) -> None:
    layout = WeightLayout.plan([("a", torch.zeros(nbytes, dtype=torch.uint8))], bucket_nbytes=1 << 18)
    flat = FlatVersion(layout, torch.device("cpu"))
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    flat.buckets[0].copy_(raw)
    before, after = Checksums(layout, device=raw.device), Checksums(layout, device=raw.device)
    before.add(0, flat.buckets[0])
    flat.buckets[0][place % nbytes] ^= change
    after.add(0, flat.buckets[0])
    assert str(after.compare(before.values)) == "corrupt: buckets [0] of 1"


def test_large_contiguous_tensors_are_lent_as_they_lie() -> None:
    big, turned = torch.randn(64, 64), torch.randn(64, 64).T
    layout = WeightLayout.plan([("big", big), ("turned", turned)], bucket_nbytes=8192)
    buffer = BucketRing(layout, backend=CPU)
    reader = _reader(layout, [("big", big), ("turned", turned)])
    leases = [buffer.pack(index, reader.tensors_of(bucket)) for index, bucket in enumerate(layout.buckets)]
    assert [lease.copied for lease in leases] == [False, False, True, True]
    assert leases[0].memory.data_ptr() == big.data_ptr()


class _Done(Pending):
    """An operation with a flag: was it waited for?"""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True

    def complete(self) -> None:
        self.wait()


def test_a_slot_is_packed_again_only_after_its_broadcast() -> None:
    named = [(f"t{number}", torch.full((200,), number, dtype=torch.uint8)) for number in range(12)]
    layout = WeightLayout.plan(named, bucket_nbytes=1024)
    buffer, reader = BucketRing(layout, backend=CPU, buckets=2), _reader(layout, named)
    first, broadcast = buffer.pack(0, reader.tensors_of(layout.buckets[0])), _Done()
    first.in_use_until(broadcast)
    buffer.pack(1, reader.tensors_of(layout.buckets[1]))
    assert not broadcast.waited
    buffer.pack(2, reader.tensors_of(layout.buckets[2]))
    assert broadcast.waited
    with pytest.raises(WeightsError, match="bucket 0 is no longer in the ring"):
        first.in_use_until(broadcast)


def test_packing_again_allocates_no_bucket() -> None:
    named = [(f"t{number}", torch.zeros(3, 5).T) for number in range(200)]
    layout = WeightLayout.plan(named, bucket_nbytes=1 << 16)
    buffer = BucketRing(layout, backend=CPU)

    def pack() -> list[int]:
        reader = _reader(layout, named)
        return [
            buffer.pack(index, reader.tensors_of(bucket)).memory.data_ptr()
            for index, bucket in enumerate(layout.buckets)
        ]

    places = [pack() for _ in range(3)]
    assert places[0] == places[1] == places[2] and len(set(places[0])) <= 2
