"""Role maps: JSON in and out, equality, hash, and what is refused."""

import json

import pytest
from toys import toy_clip, uniform_map, varied_map

from dear_plugin.model_identity import ModelIdentity, identity
from dear_plugin.roles import HeadInfo, HeadRole, RoleMap, shipped_map_names


def test_save_and_load_give_the_same_map(tmp_path, geometry):
    found = varied_map(geometry)
    model = identity(toy_clip(geometry), name="toy")
    role_map = RoleMap(found.layers, found.heads, found.infos, model, "attribute-probe", {"threshold": 0.25})
    path = role_map.save(tmp_path / "sub" / "map.json")
    again = RoleMap.load(path)
    assert again == role_map
    assert again.content_hash() == role_map.content_hash()
    assert json.loads(path.read_text())["schema"] == 1
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_roles_are_looked_up_by_layer_and_head_from_zero():
    role_map = RoleMap.from_heads(
        {(4, 0): HeadInfo("attribute", "color", 0.5, {"eta": 0.7}), (4, 1): HeadInfo("mixed")}, method="probe"
    )
    assert role_map.role(4, 0) == HeadInfo(HeadRole.ATTRIBUTE, "color", 0.5, {"eta": 0.7})
    assert role_map.role(4, 1).role is HeadRole.MIXED
    with pytest.raises(ValueError, match=r"role map has no layer 3; it has layers \[4\]"):
        role_map.role(3, 0)
    with pytest.raises(ValueError, match="no head 2; heads are 0-1"):
        role_map.role(4, 2)


def test_hash_follows_content():
    a = RoleMap.uniform("mixed", layers=[1, 2], heads=3)
    b = RoleMap.uniform(HeadRole.MIXED, layers=range(1, 3), heads=3)
    c = RoleMap.uniform("generalization", layers=[1, 2], heads=3)
    assert a == b and a.content_hash() == b.content_hash() and hash(a) == hash(b)
    assert a != c and a.content_hash() != c.content_hash()


def _data() -> dict:
    return RoleMap.uniform("mixed", layers=[1], heads=2).to_dict()


def _broken(change) -> dict:
    data = _data()
    change(data)
    return data


REFUSED = {
    "unknown field": (lambda d: d.update(rolls=[]), r"unknown field 'rolls'. Did you mean 'roles'\?"),
    "unknown entry field": (lambda d: d["roles"][0].update(atribute="x"), r"unknown field 'atribute'. Did you mean"),
    "missing field": (lambda d: d.pop("method"), "missing field 'method'"),
    "schema": (lambda d: d.update(schema=7), "schema 7, this version of dear_plugin reads schema 1"),
    "role": (lambda d: d["roles"][0].update(role="mixd"), "layer 1, head 0: unknown head role 'mixd'. Did you mean 'm"),
    "attribute": (lambda d: d["roles"][0].update(role="attribute"), "an attribute head needs an attribute"),
    "entropy": (lambda d: d["roles"][0].update(entropy_bits="high"), "entropy_bits must be a finite number of bits"),
    "negative entropy": (lambda d: d["roles"][0].update(entropy_bits=-1.0), "entropy_bits cannot be negative"),
    "outside": (lambda d: d["roles"][1].update(head=5), "entry for layer 1, head 5 lies outside"),
    "twice": (lambda d: d["roles"][1].update(head=0), "layer 1, head 0 appears twice"),
    "hole": (lambda d: d["roles"].pop(), "no entry for layer 1, head 1"),
    "heads": (lambda d: d.update(heads=0), "heads must be a whole number of at least 1, got 0"),
    "layers": (lambda d: d.update(layers="1"), "layers must be a list of whole numbers"),
    "parameters": (lambda d: d.update(parameters=[]), "parameters must be a JSON object"),
    "model": (lambda d: d.update(model={"family": "openai"}), "model identity: missing field"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_map_with_a_wrong_field_is_refused(name):
    change, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        RoleMap.from_dict(_broken(change))


def test_a_file_that_is_no_map_is_refused_with_its_path(tmp_path):
    path = tmp_path / "map.json"
    path.write_text("{not json")
    with pytest.raises(ValueError, match="map.json is not JSON"):
        RoleMap.load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="map.json: role map: wanted a JSON object, got list"):
        RoleMap.load(path)
    with pytest.raises(FileNotFoundError, match="neither a file nor one of the shipped maps"):
        RoleMap.load("no-such-map")


def test_layers_and_heads_of_a_map_must_fit_its_model():
    model = identity(toy_clip("open_clip"))
    with pytest.raises(ValueError, match="role map names layer 9, its model has layers 0-2"):
        RoleMap((9,), 2, ((HeadInfo("mixed"),) * 2,), model)
    with pytest.raises(ValueError, match="role map has 3 heads a layer, its model has 2"):
        RoleMap((1,), 3, ((HeadInfo("mixed"),) * 3,), model)
    with pytest.raises(ValueError, match="must rise from 0 upwards without repeats"):
        RoleMap.uniform("mixed", layers=[2, 1], heads=2)


@pytest.mark.parametrize("name", shipped_map_names())
def test_a_shipped_map_says_which_model_it_is_for(name):
    """Maps made on the weights carry their identity; maps made from published texts carry the geometry they fit."""
    roles = RoleMap.load(name)
    if roles.model is None:
        intended = roles.parameters["intended"]
        assert roles.heads == intended["heads"]
        assert max(roles.layers) < intended["layers"]
    else:
        assert roles.heads == roles.model.heads


def test_identity_is_the_same_for_both_libraries_and_for_half():
    openai, open_clip = toy_clip("openai"), toy_clip("open_clip")
    open_clip.load_state_dict(openai.state_dict())
    a, b = identity(openai), identity(open_clip, name="twin")
    assert (a.family, b.family) == ("openai", "open_clip")
    assert a.difference(b) == []
    assert a.difference(identity(toy_clip("open_clip").half())) != [], "other weights"
    assert b.difference(identity(open_clip.half())) == [], "the half copy is the same model"


def test_identity_names_what_differs():
    quick = identity(toy_clip("open_clip"))
    changed = ModelIdentity.from_dict({**quick.to_dict(), "activation": "gelu"})
    assert quick.difference(changed) == ["activation: 'quick_gelu' against 'gelu'"]
    model = toy_clip("open_clip")
    model.visual.proj.data[0, 0] += 1
    assert [d.split(":")[0] for d in quick.difference(identity(model))] == ["sha256"]


def test_uniform_attribute_map_needs_its_attribute():
    assert uniform_map("openai", "attribute", "color").attributes() == ("color",)
    with pytest.raises(ValueError, match="an attribute head needs an attribute"):
        uniform_map("openai", "attribute")
