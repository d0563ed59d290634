"""Lists of a user on top of the shipped ones, and those that are refused."""

import shutil
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from amp_graph.errors import ListError
from amp_graph.ir import Color
from amp_graph.listing import KNOWN
from amp_graph.operator_names import known_names
from amp_graph.oplists import OpLists, load_lists
from amp_graph.policy import Policy

ATEN = torch.ops.aten
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def lists() -> OpLists:
    return load_lists(strict=True)


def test_a_user_entry_wins_over_overloads_and_in_place_forms_of_the_shipped_lists(lists):
    merged = lists.merged({"infer": ["aten.max", "scatter"], "deny": ["aten.gelu"]})
    assert merged.lookup(ATEN.max.dim).color is Color.INFER
    assert merged.lookup(ATEN.scatter_.reduce).color is Color.INFER
    assert merged.lookup(ATEN.gelu_.default).color is Color.DENY
    assert merged.lookup(ATEN.gelu.default).why == "Listed by the user."
    assert lists.lookup(ATEN.gelu.default).color is Color.INFER


def test_a_user_overload_leaves_the_others_alone(lists):
    merged = lists.merged({"allow": ["aten.pow.Tensor_Scalar"]})
    assert merged.lookup(ATEN.pow.Tensor_Scalar).color is Color.ALLOW
    assert merged.lookup(ATEN.pow.Scalar).color is Color.DENY


def test_what_is_known_of_arguments_survives_a_move(lists):
    listing = lists.merged({"allow": ["aten.batch_norm"]}).lookup(ATEN.batch_norm.default)
    assert listing.low_args == {"other": ("input",)}
    assert not listing.storage
    assert not listing.bounded
    group = {"why": "small", "bounded": True, "ops": ["aten.sum"]}
    assert lists.merged({"deny": {"mine": group}}).lookup(ATEN.sum.dim_IntList).widens
    assert not lists.merged({"allow": ["aten.sum"]}).lookup(ATEN.sum.dim_IntList).widens


def test_what_a_user_says_of_arguments_is_not_overruled(lists):
    group = {"why": "mine", "promotes": False, "metadata_args": [], "ops": ["aten.add"]}
    listing = lists.merged({"infer": {"mine": group}}).lookup(ATEN.add.Tensor)
    assert lists.lookup(ATEN.add.Tensor).promotes and not listing.promotes


def test_a_mapping_that_changes_later_changes_no_policy():
    given = {"deny": ["aten.linear"]}
    policy = Policy("bfloat16", lists=given)
    given["deny"].clear()
    assert policy.load_lists().lookup(ATEN.linear.default).color is Color.DENY
    policy = Policy("bfloat16", lists=MappingProxyType({"deny": ["aten.linear"]}))
    assert policy.load_lists().lookup(ATEN.linear.default).color is Color.DENY


@pytest.mark.parametrize("form", ["", "_"])
def test_what_is_known_of_every_overload_survives_a_move(lists, form):
    """Of the operator, or of the one that writes its result in place."""
    known = known_names()
    packets = {".".join(name.split(".")[:2]) + form for name in lists.entries}
    packets = {packet for packet in packets & known if not packet.startswith("higher_order.")}
    moved = lists.merged({"deny": sorted(packets)})
    overloads = [name for name in known if name.rpartition(".")[0] in packets]
    assert len(overloads) > 100
    for overload in overloads:
        before, after = lists.lookup(overload), moved.lookup(overload)
        assert after.color is Color.DENY and after.file == "the lists given"
        for what in KNOWN if before is not None else ():
            assert getattr(after, what) == getattr(before, what), (overload, what)


def test_an_overload_that_another_entry_speaks_for_is_not_taken_off(lists):
    with pytest.raises(ListError, match=r"'aten\.pow' is on the deny list"):
        lists.without("deny", "pow.Scalar")
    with pytest.raises(ListError, match="it is on no list"):
        lists.without("deny", "mine.own")


def test_several_sources_merge(lists, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[allow.mine]\nwhy = "Measured."\nops = ["aten.mul"]')
    for source in (file, str(file), [{"infer": ["aten.exp"]}, file]):
        listing = lists.merged(source).lookup(ATEN.mul.Tensor)
        assert (listing.color, listing.group, listing.file) == (Color.ALLOW, "mine", str(file))


OK = 'why = "x."\nops = ["aten.mul"]\n'
BAD_LISTS = {
    '[deny.g]\nops = ["aten.mul"]': "group 'g': 'why' is missing",
    '[deny.g]\nwhy = "x."': "group 'g': 'ops' is missing",
    f"[deny.g]\n{OK}bounde = true": "group 'g': unknown key 'bounde'. Did you mean 'bounded'?",
    f"[allow.g]\n{OK}bounded = true": "'bounded' means something on the deny list only",
    f'[deny.g]\n{OK}storage = "half"': "storage is a level, safe, balanced, max, not 'half'",
    f"[deny.g]\n{OK}storage = 3": "'storage' must be a str or table, not 3",
    f'[deny.g]\n{OK}storage = {{cpu = "low"}}': "storage is a level",
    f'[deny.g]\n{OK}storage = {{cdua = "max"}}': "'storage' has 'cdua', .*Did you mean 'cuda'?",
    f'[deny.g]\n{OK}storage = {{cpu = ["max"]}}': "'storage' for 'cpu' must be a str, not",
    f"[deny.g]\n{OK}storage = {{cpu = 3}}": "'storage' for 'cpu' must be a str, not 3",
    f'[deny.g]\n{OK}low_args = {{cpu = "self"}}': "'low_args' for 'cpu' must be a list, not 'self'",
    f"[deny.g]\n{OK}low_args = {{cpu = [3]}}": "'low_args' for 'cpu' must hold strings only",
    f'[deny.g]\n{OK}low_args = {{float16 = ["self"]}}': "'float16', which is no type of device",
    f'[deny.g]\n{OK}low_args = ["othr"]': "has an argument 'othr'. Did you mean 'other'?",
    f'[deny.g]\n{OK}metadata_args = ["nope"]': "none of its operators has an argument 'nope'",
    f"[deny.g]\n{OK}[deny.h]\n{OK}": "group 'h': 'aten.mul' is in .*, group 'g' already",
    f"[deny.g]\n{OK}[infer.h]\n{OK}": "'aten.mul' is on the deny list .* and the infer list",
    '[deny.g]\nwhy = "x."\nops = ["aten.gellu"]': "no operator 'aten.gellu'. Did you mean 'aten.g",
    '[deny.g]\nwhy = "x."\nops = ["lib.op"]': "needs that library imported, or `optional = true`",
    '[deny.g]\nwhy = "x."\nops = "aten.mul"': "'ops' must be a list, not 'aten.mul'",
    '[deny.g]\nwhy = "x."\nops = [1]': "'ops' must hold strings only",
    "[deny]\nmul = 1": "a group is a table with `why` and `ops`, not 1",
    f"[dany.g]\n{OK}": "'dany' is none of allow, deny, infer, clear. Did you mean 'deny'?",
    "schema = 2": "reads `schema = 1` only",
    "[deny.g\n": "not valid TOML: .*line 1",
}


@pytest.mark.parametrize("text", BAD_LISTS)
def test_a_bad_list_is_refused_by_file_and_group(lists, tmp_path, text):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ListError, match=BAD_LISTS[text].replace("?", r"\?")) as error:
        lists.merged(file)
    assert str(error.value).startswith(str(file))


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_file_in_another_encoding_is_refused(tmp_path, encoding):
    file = tmp_path / "bad.toml"
    file.write_text('[deny.g]\nwhy = "größer"\nops = ["aten.mul"]', encoding=encoding)
    line = 1 if encoding == "utf-16" else 2
    with pytest.raises(ListError, match=rf"bad\.toml: not UTF-8, .* in line {line}\. Save it as"):
        Policy(lists=file).load_lists()


def test_a_byte_order_mark_is_passed_over(lists, tmp_path):
    """Editors of Windows write one."""
    file = tmp_path / "mine.toml"
    file.write_text(f"[deny.g]\n{OK}", encoding="utf-8-sig")
    assert lists.merged(file).lookup(ATEN.mul.Tensor).color is Color.DENY


def test_an_unreadable_file_and_a_contradiction_between_sources(lists, tmp_path):
    with pytest.raises(
        ListError, match=r"no\.toml: cannot be read: No such file or directory\. Give"
    ):
        lists.merged(tmp_path / "no.toml")
    with pytest.raises(ListError, match=r"on the deny list .*given.* and the infer list"):
        lists.merged([{"deny": ["aten.mul"]}, {"infer": ["aten.mul"]}])


def test_operators_of_another_torch_are_dropped_unless_strict(tmp_path):
    folder = shutil.copytree(ROOT / "allow_deny_lists", tmp_path / "lists")
    clear = folder / "clear.toml"
    clear.write_text(clear.read_text().replace('"aten.where"', '"aten.where", "aten.not_yet"'))
    entries = load_lists(folder).entries
    assert "aten.not_yet" not in entries
    assert "torchvision.roi_align" in entries  # optional: the library may be imported later
    with pytest.raises(ListError, match=r"clear.toml, group 'selecting'.*'aten.not_yet'"):
        load_lists(folder, strict=True)


def test_a_relative_path_is_that_of_when_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.toml").write_text('[deny.own]\nwhy = "a test"\nops = ["aten.gelu"]\n')
    monkeypatch.chdir(tmp_path)
    policies = Policy(lists="own.toml"), Policy(lists=[Path("own.toml"), {"allow": ["aten.exp"]}])
    monkeypatch.chdir("/")
    for policy in policies:
        assert policy.load_lists().lookup(torch.ops.aten.gelu.default).color is Color.DENY
