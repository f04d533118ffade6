"""Keys are read from files and variables, and are never shown."""

from __future__ import annotations

import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.http.guards.keys import API_KEY, CONTROL_KEY, FASTDEPLOY_API_KEY, NO_KEYS, Keys, pop_keys, read_keys

SECRET = "sk-do-not-show-me"


def test_each_line_of_a_file_is_a_key_and_a_file_takes_precedence_over_a_variable(tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(b"old-key\r\n\n  new-key  \n")
    environment = {API_KEY: "from-environment", CONTROL_KEY: "c1\nc2"}
    assert read_keys([str(file)], None, environment) == Keys((b"old-key", b"new-key"), (b"c1", b"c2"))
    assert read_keys(None, None, environment).data == (b"from-environment",)
    assert read_keys(None, None, {}) == NO_KEYS


@pytest.mark.parametrize("content", [b"", b"\n \n", b"two words", b"\xc3\xa9", b"x" * (65 << 10)])
def test_a_file_without_a_valid_key_is_refused_and_its_content_is_not_shown(tmp_path, content):
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(InvalidField, match="control_key: expected") as info:
        read_keys(None, str(file), {})
    assert not content.strip() or content.decode() not in str(info.value)


def test_an_empty_variable_is_refused():
    with pytest.raises(InvalidField, match=f"control_key: .*{CONTROL_KEY}"):
        read_keys(None, None, {CONTROL_KEY: ""})


@pytest.mark.parametrize("path", [SECRET, "/", SECRET + "\0"])
def test_a_key_in_place_of_a_path_is_not_repeated(path):
    with pytest.raises(InvalidField, match="control_key: expected the path of a file") as info:
        read_keys(None, path, {})
    assert SECRET not in str(info.value)


def test_an_api_key_is_a_file_or_the_key_itself_and_may_be_repeated(tmp_path):
    (tmp_path / "keys").write_text("of-file-1\nof-file-2\n")
    keys = read_keys(["the-key", str(tmp_path / "keys"), "other"], None, {FASTDEPLOY_API_KEY: "weaker"})
    assert keys.data == (b"the-key", b"of-file-1", b"of-file-2", b"other")


@pytest.mark.parametrize("path", ["/nowhere/" + SECRET, "./" + SECRET, "~/" + SECRET])
def test_an_api_key_that_looks_like_a_path_must_be_a_file(path):
    with pytest.raises(InvalidField, match="api_key: expected the path of a file") as info:
        read_keys([path], None, {})
    assert SECRET not in str(info.value)


@pytest.mark.parametrize("key", ["two words", "é" + SECRET])
def test_an_api_key_that_no_header_can_hold_is_refused_and_not_shown(key):
    with pytest.raises(InvalidField, match="api_key: expected printable ASCII") as info:
        read_keys([key], None, {})
    assert key not in str(info.value)


def test_keys_of_fastdeploys_variable_have_commas_and_are_weaker_than_ours_and_leave_the_environment():
    assert read_keys(None, None, {FASTDEPLOY_API_KEY: "a,b"}).data == (b"a", b"b")
    environment = {FASTDEPLOY_API_KEY: "a", API_KEY: "ours"}
    assert pop_keys(environment).data == (b"ours",) and not environment
    assert FASTDEPLOY_API_KEY not in Keys((b"a",)).environment({FASTDEPLOY_API_KEY: "a"})


def test_keys_pass_through_an_environment_and_are_removed_from_it():
    keys = Keys((b"a", b"b"), (b"c",))
    environment = keys.environment({"PATH": "/bin", API_KEY: "other"})
    assert pop_keys(environment) == keys and environment == {"PATH": "/bin"}
    assert NO_KEYS.environment({"PATH": "/bin", CONTROL_KEY: "c"}) == {"PATH": "/bin"}


def test_the_repr_of_keys_hides_them():
    assert SECRET not in repr(Keys((SECRET.encode(),), (SECRET.encode(),)))
