"""Encoders of four families with random weights, and their tokenizers, as folders that a model is read from."""

import torch
import transformers

WORDS = ["ant", "bee", "cat", "dog", "elk", "fox"]


def bert_tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    return transformers.BertTokenizer(vocab={word: number for number, word in enumerate(words)})


def roberta_tokenizer():
    letters = sorted({*"".join(WORDS), "\u0120"})
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *letters]
    return transformers.RobertaTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[])


def deberta_tokenizer():
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"\u2581{word}" for word in WORDS), "[MASK]"]
    return transformers.DebertaV2Tokenizer(vocab=[(piece, 0.0) for piece in pieces])


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
MODELS = {
    "Bert": (bert_tokenizer, TINY),
    "DistilBert": (bert_tokenizer, {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}),
    "Roberta": (roberta_tokenizer, {**TINY, "pad_token_id": 1}),
    "DebertaV2": (deberta_tokenizer, {**TINY, "relative_attention": True, "pos_att_type": ["c2p"]}),
}


def save_model(family, folder):
    """An encoder with random weights, and its tokenizer."""
    make, shape = MODELS[family]
    tokenizer = make()
    config = getattr(transformers, f"{family}Config")(vocab_size=64, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForMaskedLM")(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer
