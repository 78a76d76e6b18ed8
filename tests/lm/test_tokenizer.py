"""Characters to tokens and back."""

import pytest

from pagedkv.lm import CharacterTokenizer


def test_a_token_is_the_characters_place_in_the_vocabulary():
    tokenizer = CharacterTokenizer("\n abc")
    assert tokenizer.encode("cab a\n").tolist() == [4, 2, 3, 1, 2, 0]
    assert len(tokenizer) == 5


def test_decoding_gives_the_text_back(model):
    for text in ("", "Good night", "Good day", "Good morrow, ", "ROMEO:\nO!", model.tokenizer.vocabulary):
        assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("text", "position"), [("é", 0), ("Good nïght", 6), ("a\tb", 1), ("Gute Nacht 🌙", 11)]
)
def test_an_unknown_character_is_named_with_its_position(model, text, position):
    with pytest.raises(
        ValueError, match=rf"never seen {text[position]!r} \(position {position}\)".replace("\\t", "\\\\t")
    ):
        model.tokenizer.encode(text)


@pytest.mark.parametrize("token", [-1, 65])
def test_a_number_that_is_no_token_is_refused(model, token):
    with pytest.raises(ValueError, match=f"{token} is no token"):
        model.tokenizer.decode([0, token])


def test_a_vocabulary_has_each_character_once():
    with pytest.raises(ValueError, match="'a' twice"):
        CharacterTokenizer("abca")
