"""app.adapters.names: what an adapter may be called."""

import pytest

from app.adapters import AdapterRefused, check_name


@pytest.mark.parametrize("name", ["sql", "a", "SQL-2.1_final", "7b", "a..b", "x" * 128])
def test_a_plain_name_is_taken(name: str) -> None:
    check_name(name, {"base"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "empty"),
        ("x" * 300, "300 characters; 128"),
        ("../x", "letters, digits"),
        ("..", "letters, digits"),
        ("a/b", "letters, digits"),
        ("a\\b", "letters, digits"),
        ("a@b", "letters, digits"),
        ("a b", "letters, digits"),
        ("a\nb", "letters, digits"),
        ("a\n", "letters, digits"),
        ("\x00", "letters, digits"),
        ("é", "letters, digits"),
        ("base", "'base' is the name of a served model"),
        ("org/base", "'org/base' is the name of a served model"),
    ],
)
def test_another_is_refused_and_the_message_says_why(name: str, said: str) -> None:
    with pytest.raises(AdapterRefused, match=said) as caught:
        check_name(name, {"base", "org/base"})
    assert (caught.value.status, caught.value.code) == (400, "invalid_adapter")
    assert caught.value.message.isprintable()
