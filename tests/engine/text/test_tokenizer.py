"""The tokenizer gives transformers' ids, renders transformers' prompts, and trusts no template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from teachllm.engine.text.chat_template import render_template
from teachllm.engine.text.tokenizer import Tokenizer, sanitize_for_terminal
from tests.programs import run_program
from tests.thorough import times

CORPUS = ["The cache keeps keys and values.", "hello world, hello cache", "größer 模型 😀 def f(x):\n    return x"] * 4
TEXTS = [
    "hello world",
    " hello",
    "The  cache\n\n",
    "größer 模型 😀🏽",
    "",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<s>a</s> b",
    "\x00é",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if m.tool_calls is defined %}calls{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "What is a cache?"}]
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def byte_level(specials: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """Like Llama 2's: sentencepiece's space mark, and a byte token for what the vocabulary lacks."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *byte_tokens,
        "▁",
        *"abcdehklorstuvwy,.:()",
        "he",
        "ll",
        "hell",
        "hello",
        "▁hello",
    ]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace_as_first_published() -> tokenizers.Tokenizer:
    """Llama 2's older file marks spaces in a normalizer; transformers' Llama class replaces it by its own rules."""
    tokenizer = metaspace()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    return tokenizer


def save(folder: Path, tokenizer: tokenizers.Tokenizer, config: dict, model_type: str = "qwen3") -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def with_bos_processor(tokenizer: tokenizers.Tokenizer, bos: str) -> tokenizers.Tokenizer:
    special = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    return tokenizer


LLAMA3 = ["<|begin_of_text|>", "<|eot_id|>", *SPECIALS]
LLAMA3_NAMED = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
SENTENCEPIECE_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    chatml = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    qwen_pre = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False, use_regex=True)])
    qwen_like = byte_level(SPECIALS)
    qwen_like.pre_tokenizer = qwen_pre
    return {
        "chatml": save(root / "chatml", byte_level(SPECIALS), chatml),
        "qwen class, other rules": save(root / "qwen", qwen_like, {**chatml, "tokenizer_class": "Qwen2Tokenizer"}),
        "bos in the file": save(
            root / "bos_file",
            with_bos_processor(byte_level(LLAMA3), "<|begin_of_text|>"),
            {"tokenizer_class": "PreTrainedTokenizerFast", **LLAMA3_NAMED},
            "llama",
        ),
        "bos in the configuration alone": save(
            root / "bos_config",
            byte_level(LLAMA3),
            {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, **LLAMA3_NAMED},
            "llama",
        ),
        "bos in the file, refused by the configuration": save(
            root / "no_bos",
            with_bos_processor(byte_level(LLAMA3), "<|begin_of_text|>"),
            {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **LLAMA3_NAMED},
            "llama",
        ),
        "byte-level behind a Llama class": save(
            root / "llama_class",
            with_bos_processor(byte_level(LLAMA3), "<|begin_of_text|>"),
            {"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True, "add_bos_token": True, **LLAMA3_NAMED},
            "llama",
        ),
        "tokens declared outside the file": save(
            root / "outside",
            byte_level(SPECIALS[:1]),
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "additional_special_tokens": ["<s>", "</s>"],
                "added_tokens_decoder": {"331": {"content": "<|im_end|>", "special": True, "normalized": False}},
            },
        ),
        "metaspace": save(
            root / "metaspace",
            with_bos_processor(metaspace(), "<s>"),
            {"tokenizer_class": "PreTrainedTokenizerFast", **SENTENCEPIECE_NAMED},
            "llama",
        ),
        "metaspace behind a Llama class": save(
            root / "metaspace_llama",
            with_bos_processor(metaspace_as_first_published(), "<s>"),
            {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **SENTENCEPIECE_NAMED},
            "llama",
        ),
    }


CASES = [
    "chatml",
    "qwen class, other rules",
    "bos in the file",
    "bos in the configuration alone",
    "bos in the file, refused by the configuration",
    "byte-level behind a Llama class",
    "tokens declared outside the file",
    "metaspace",
    "metaspace behind a Llama class",
]


@pytest.mark.parametrize("case", CASES)
def test_ids_text_and_special_tokens_equal_those_of_transformers(case: str, folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folders[case])
    ours = Tokenizer.load(str(folders[case]))
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, (text, special)
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    assert set(theirs.all_special_ids) <= ours.special_ids


def test_bos_is_added_where_the_checkpoint_says_so(folders: dict[str, Path]) -> None:
    def starts_with_bos(case: str) -> bool:
        tokenizer = Tokenizer.load(str(folders[case]))
        with_specials, without = tokenizer.encode("hello"), tokenizer.encode("hello", add_special_tokens=False)
        return len(with_specials) == len(without) + 1 and with_specials[1:] == without

    assert starts_with_bos("bos in the file")
    assert starts_with_bos("metaspace behind a Llama class")
    assert not starts_with_bos("chatml")


@settings(max_examples=times(40, 200))
@given(text=st.text(max_size=40))
def test_any_text_survives_encoding_with_byte_tokens(folders: dict[str, Path], text: str) -> None:
    tokenizer = Tokenizer.load(str(folders["chatml"]))
    # NFC is this tokenizer's own normalisation; nothing else may change.
    assert tokenizer.decode(tokenizer.encode(text)) == normalizers.NFC().normalize_str(text)


def test_loading_and_encoding_leaves_torch_and_transformers_unloaded(folders: dict[str, Path]) -> None:
    program = (
        "import sys; from teachllm.engine.text.tokenizer import Tokenizer, sanitize_for_terminal\n"
        f"tokenizer = Tokenizer.load({str(folders['chatml'])!r})\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'hi'}])\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = run_program("-c", program)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_token_alone_keeps_its_leading_space(folders: dict[str, Path]) -> None:
    for case in ("chatml", "metaspace"):
        tokenizer = Tokenizer.load(str(folders[case]))
        ids = tokenizer.encode("hello hello", add_special_tokens=False)
        assert [tokenizer.token_text(i) for i in ids][-1] == " hello"
    assert Tokenizer.load(str(folders["metaspace"])).token_text(3 + 0xC3) == "\N{REPLACEMENT CHARACTER}"
    tokenizer = Tokenizer.load(str(folders["chatml"]))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("<|im_start|>")] == ["<|im_start|>"]


def test_bad_words_are_encoded_with_and_without_a_space_before(folders: dict[str, Path]) -> None:
    for case in ("chatml", "metaspace"):
        tokenizer = Tokenizer.load(str(folders[case]))
        sequences = tokenizer.encode_bad_words([" hello"])
        assert tokenizer.encode("hello", add_special_tokens=False) in sequences
        assert tokenizer.encode("a hello", add_special_tokens=False)[-1:] in sequences


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "größe", "description": "<&>"}}]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_conversation_becomes_the_prompt_that_transformers_makes(
    folders: dict[str, Path], tools: list[dict] | None, add_generation_prompt: bool
) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folders["chatml"]), Tokenizer.load(str(folders["chatml"]))
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    messages = [*MESSAGES, {"role": "assistant", "content": "It keeps things.", "tool_calls": None}]
    expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.render_chat_template(messages, **options) == expected
    assert ours.apply_chat_template(messages, **options) == theirs.encode(expected, add_special_tokens=False)


def test_the_jinja_features_that_templates_use_work() -> None:
    template = (
        "{%- for m in messages -%}{% if loop.index0 == 2 %}{% break %}{% endif %}\n"
        "  {% generation %}{{ m.content | trim }}{% endgeneration %}|\n{%- endfor %}\n"
        "{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }} {{ bos_token }} "
        "{{ strftime_now('%Y') | length }}"
        "{{ {'b': '<', 'a': 1} | tojson(indent=1) }}"
    )
    variables = {"messages": [{"content": " a "}, {"content": "b"}, {"content": "c"}], "bos_token": "<s>"}
    assert render_template(template, variables) == 'a|b|2 <s> 4{\n "b": "<",\n "a": 1\n}'


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__class__.__base__ }}{{ messages.__class__.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ (raise_exception | attr('__globals__')).os }}",
        "{% include '/etc/passwd' %}",
        "{{ undefined_name.attribute }}",
        "{% for %}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_a_template_that_attacks_runs_away_or_fails_is_one_clear_line(template: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="the chat template failed") as caught:
        render_template(template, {"messages": messages})
    assert "\n" not in str(caught.value)
    assert messages == [{"role": "user", "content": "hi"}]


def test_a_checkpoint_without_a_template_says_which_argument_helps(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(str(folders["metaspace"]))
    with pytest.raises(ValueError, match="chat_template="):
        tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.render_chat_template(MESSAGES, chat_template="{{ messages[1].content }}") == MESSAGES[1]["content"]


def test_a_template_file_wins_and_named_templates_are_found(tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": "old"}
    folder = save(tmp_path / "t", byte_level(SPECIALS), config)
    (folder / "chat_template.jinja").write_text("new{{ eos_token }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer.render_chat_template(MESSAGES) == "new<|im_end|>"
    assert tokenizer.render_chat_template(MESSAGES, tools=[{}]) == "tools"
    assert tokenizer.render_chat_template(MESSAGES, chat_template="tool_use") == "tools"


def test_a_folder_without_or_with_a_broken_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ValueError, match=r"tokenizer\.json: not JSON") as caught:
        Tokenizer.load(str(tmp_path))
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        Tokenizer.load(str(tmp_path))


def test_an_unknown_hub_id_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="neither a local folder nor a model on the hub") as caught:
        Tokenizer.load("nobody/no-such-model")
    assert "\n" not in str(caught.value)


CUSTOM_CODE = """
from transformers import PreTrainedTokenizer

class Letters(PreTrainedTokenizer):
    vocab_files_names = {}
    def __init__(self, **kwargs):
        self._letters = "_abcdefgh "
        super().__init__(unk_token="_", **kwargs)
    @property
    def vocab_size(self): return len(self._letters)
    def get_vocab(self): return {c: i for i, c in enumerate(self._letters)}
    def _tokenize(self, text): return list(text)
    def _convert_token_to_id(self, token): return max(self._letters.find(token), 0)
    def _convert_id_to_token(self, index): return self._letters[index]
    def convert_tokens_to_string(self, tokens): return "".join(tokens)
    def save_vocabulary(self, *args, **kwargs): return ()
"""


def test_a_checkpoints_own_code_runs_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "letters"
    folder.mkdir()
    (folder / "letters.py").write_text(CUSTOM_CODE)
    config = {"tokenizer_class": "Letters", "auto_map": {"AutoTokenizer": ["letters.Letters", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer that can be loaded"):
        Tokenizer.load(str(folder))
    tokenizer = Tokenizer.load(str(folder), trust_remote_code=True)
    assert tokenizer.encode("bad cab") == [2, 1, 4, 9, 3, 1, 2]
    assert tokenizer.decode([2, 1, 4]) == "bad"
    assert tokenizer.eos_token_id is None


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("a\rb\x08c\x00\x7f\x9b31m", "abc31m"),
        ("abc\u202edcba\u2066x\u200f", "abcdcbax"),
        ("größer 模型 😀🏽", "größer 模型 😀🏽"),
    ],
)
def test_printed_text_holds_no_control_characters(text: str, printed: str) -> None:
    assert sanitize_for_terminal(text) == printed


@given(st.text(alphabet=st.characters(max_codepoint=0x2070), max_size=30))
def test_whatever_the_model_says_no_escape_reaches_the_terminal(text: str) -> None:
    printed = sanitize_for_terminal(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c == "\u202e" for c in printed)
