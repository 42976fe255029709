from collections import UserDict

import pytest

from headway.render import end_ids, render_prompts
from headway.types import Prompt, UserError


class Words:
    """One id per word; the begin token is `<s>`, written by the tokenizer, by the template, or by both."""

    def __init__(self, *, begin=None, adds_begin=False, adds_end=False, chat_template=None, wrap=lambda ids: ids):
        words = ["<unk>", "<s>", "</s>", "user", "system", "assistant", "a", "b", "Ċ"]
        self.vocabulary = {word: place for place, word in enumerate(words)}
        self.bos_token_id, self.eos_token_id, self.unk_token_id = begin, 2, 0
        self.all_special_tokens = ["<s>", "</s>", "<unk>"]
        self.chat_template = chat_template
        self._adds_begin, self._adds_end, self._wrap = adds_begin, adds_end, wrap

    def get_vocab(self):
        return self.vocabulary

    def encode(self, text, *, add_special_tokens):
        ids = [self.vocabulary.get(word, 0) for word in text.replace("\n", " Ċ ").split()]
        before = [1] if add_special_tokens and self._adds_begin else []
        return before + ids + ([2] if add_special_tokens and self._adds_end else [])

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert tokenize
        text = " ".join(f"{message['role']} {message['content']}" for message in conversation)
        return self._wrap(self.encode(f"<s> {text} assistant", add_special_tokens=self._adds_begin))


def rendered(tokenizer, text="a b", *, chat=False, system=None, context_tokens=None, max_new_tokens=4):
    prompts = render_prompts(
        [Prompt("p1", text, answer="b")],
        tokenizer,
        chat=chat,
        system=system,
        context_tokens=context_tokens,
        max_new_tokens=max_new_tokens,
    )
    assert [(prompt.uid, prompt.text, prompt.answer) for prompt in prompts] == [("p1", text, "b")]
    return prompts[0].tokens


def test_plain_text():
    assert rendered(Words()) == (6, 7)
    assert rendered(Words(begin=1, adds_begin=True)) == (1, 6, 7)


def test_a_chat_with_and_without_a_system_message():
    tokenizer = Words(begin=1, chat_template="...")
    assert rendered(tokenizer, chat=True) == (1, 3, 6, 7, 5)
    assert rendered(tokenizer, chat=True, system="b") == (1, 4, 7, 3, 6, 7, 5)


def test_template_and_tokenizer_both_begin_and_the_prompt_begins_once():
    """Case B19(d)."""
    assert rendered(Words(begin=1, adds_begin=True, chat_template="..."), chat=True) == (1, 3, 6, 7, 5)
    assert rendered(Words(begin=1, adds_begin=True), "<s> a") == (1, 6)


@pytest.mark.parametrize("wrap", [lambda ids: UserDict(input_ids=ids), lambda ids: {"input_ids": [ids]}, tuple])
def test_what_templates_return(wrap):
    assert rendered(Words(begin=1, chat_template="...", wrap=wrap), chat=True) == (1, 3, 6, 7, 5)


@pytest.mark.parametrize(
    ("tokenizer", "settings", "message"),
    [
        (Words(), {"chat": True}, "no chat template; turn data.chat off"),
        (Words(), {"system": "b"}, "data.system is set, but data.chat is off"),
        (Words(), {"text": " "}, "prompt p1 has no tokens"),
        (Words(adds_end=True), {}, "ends prompt p1 with its end token"),
        (
            Words(),
            {"context_tokens": 5},
            "prompt p1 has 2 tokens; with generate.max_new_tokens = 4 that exceeds the model's context of 5; "
            "set generate.max_new_tokens to at most 3",
        ),
        (Words(), {"context_tokens": 2}, "shorten it or leave it out"),
    ],
)
def test_unfit_prompts(tokenizer, settings, message):
    with pytest.raises(UserError, match=message):
        rendered(tokenizer, **settings)


def test_a_prompt_may_fill_the_context_exactly():
    assert rendered(Words(), context_tokens=6) == (6, 7)


def test_a_written_end_token_stays():
    assert rendered(Words(adds_end=False), "a </s>") == (6, 2)


def test_end_ids():
    assert end_ids(Words(), None) == {2}
    assert end_ids(Words(), ()) == frozenset()
    assert end_ids(Words(), ("</s>", "\n", "Ċ", "b")) == {2, 8, 7}


@pytest.mark.parametrize(
    ("word", "message"),
    [("<s/>", "'<s/>' is no token of the model; special tokens are <s>, </s>"), ("a b", "'a b' is 2 tokens, not one")],
)
def test_a_word_that_is_no_single_token(word, message):
    with pytest.raises(UserError, match=message):
        end_ids(Words(), (word,))


def test_a_tokenizer_without_an_end_token():
    tokenizer = Words()
    tokenizer.eos_token_id = None
    with pytest.raises(UserError, match=r"no end token; set generate.end_tokens; special tokens are <s>"):
        end_ids(tokenizer, None)


@pytest.mark.slow
def test_a_tokenizer_of_transformers():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {word: place for place, word in enumerate(["<s>", "</s>", "<unk>", "a", "b", "user", "assistant"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    assert rendered(tokenizer) == (0, 3, 4)
    assert rendered(tokenizer, "<s> a") == (0, 3)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} assistant{% endif %}"
    )
    assert rendered(tokenizer, chat=True) == (0, 5, 3, 4, 6)
    assert end_ids(tokenizer, None) == {1}
    assert end_ids(tokenizer, ("b",)) == {4}
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(UserError, match="refuses the messages: System role not supported"):
        rendered(tokenizer, chat=True, system="b")
