use sieve_testing::refusal;
use std::fs;

use proptest::prelude::*;

use super::*;
use crate::corpus::{Corpus, CorpusConfig};

const TEXT: &str = "fn main() {\n    println!(\"Grüße, 世界! 👩‍🚀 naïve café\");\n}\n// Ünïcödé 漢字 и кириллица\n";

fn texts() -> Vec<String> {
    let word = |number: usize| format!("{TEXT}let value_{} = {}; ", number % 37, number * number % 1009);
    (0..300).map(word).collect()
}

fn small() -> Tokenizer {
    let texts = texts();
    Tokenizer::train_on(texts.iter().map(String::as_str), 400).unwrap()
}

fn json(tokenizer: &Tokenizer) -> String {
    tokenizer.marked.to_string(false).unwrap()
}

/// The tokenizer that is read from the JSON of `tokenizer` after `change`.
fn changed(tokenizer: &Tokenizer, change: impl FnOnce(&mut serde_json::Value)) -> Tokenizer {
    let mut json: serde_json::Value = serde_json::from_str(&json(tokenizer)).unwrap();
    change(&mut json);
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

#[test]
fn training_gives_the_same_tokenizer_each_time_and_for_each_order() {
    // Hash maps inside the trainer have another seed in each run, so a result that depended on it would differ.
    let mut texts = texts();
    let first = json(&small());
    for run in 0..6 {
        texts.rotate_left(run * 7 + 1);
        let again = Tokenizer::train_on(texts.iter().map(String::as_str), 400).unwrap();
        assert_eq!(json(&again), first, "run {run}");
    }
}

#[test]
fn training_with_many_ties_does_not_depend_on_hash_order() {
    // Two letters, short words, few counts: nearly every merge is a tie.
    let mut state = 1u64;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005);
        state = state.wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for case in 0..30 {
        let words = (0..60).map(|_| (0..1 + next(30)).map(|_| ['a', 'b'][next(2) as usize]).collect());
        let words = words.collect::<Vec<String>>();
        let train = || json(&Tokenizer::train_on(words.iter().map(String::as_str), 330).unwrap());
        let first = train();
        assert!((0..3).all(|_| train() == first), "case {case}");
    }
}

#[test]
fn special_tokens_and_sizes_are_as_asked() {
    let tokenizer = small();
    assert_eq!(tokenizer.vocab_size(), 400);
    assert_eq!((tokenizer.eos_id().unwrap(), tokenizer.pad_id()), (0, Some(1)));
    let tokenizer = tokenizer.with_eos_token(Some("<|pad|>"));
    assert_eq!(tokenizer.eos_id().unwrap(), 1);
    assert_eq!(tokenizer.id_token(0).unwrap(), "<|endoftext|>");
    let tokenizer = tokenizer.with_eos_token(Some("</s>"));
    let words = r#"</s> | tokenizer.eos_token | ["<|endoftext|>", "<|pad|>"]"#;
    refusal(tokenizer.eos_id(), words);
}

#[test]
fn too_small_a_vocabulary_or_text_is_refused() {
    let train = |text: &str, vocab_size| Tokenizer::train_on([text].into_iter(), vocab_size);
    refusal(train(TEXT, 257), "take 258");
    refusal(train("ab", 300), "only 259 of the requested 300");
    // Every byte is a token, whether the training text holds it or not.
    let bytes_only = train("a", 258).unwrap();
    assert_eq!(bytes_only.encode(TEXT).unwrap().len(), TEXT.len());
}

#[test]
fn special_names_in_documents_are_text_and_in_prompts_are_tokens() {
    let tokenizer = small();
    let text = "a<|endoftext|>b";
    let ids = tokenizer.encode(text).unwrap();
    assert!(!ids.contains(&0), "{ids:?}");
    assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    let ids = tokenizer.encode_marked(text).unwrap();
    assert_eq!((ids.len(), ids[1]), (3, 0));
    assert_eq!(tokenizer.decode(&ids).unwrap(), "ab");
}

#[test]
fn a_saved_tokenizer_is_loaded_as_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let tokenizer = small();
    tokenizer.save(&path).unwrap();
    let loaded = Tokenizer::from_file(&path).unwrap();
    assert_eq!((loaded.hash(), loaded.vocab_size()), (tokenizer.hash(), 400));
    assert_eq!(loaded.encode(TEXT).unwrap(), tokenizer.encode(TEXT).unwrap());
    let words = texts();
    let other = Tokenizer::train_on(words.iter().map(String::as_str), 390).unwrap();
    assert_ne!(other.hash(), tokenizer.hash());
}

#[test]
fn truncation_and_padding_of_the_file_are_ignored() {
    let whole = small();
    let loaded = changed(&whole, |json| {
        json["truncation"] = serde_json::json!({"direction": "Right", "max_length": 3,
            "strategy": "LongestFirst", "stride": 0});
        json["padding"] = serde_json::json!({"strategy": {"Fixed": 500}, "direction": "Right",
            "pad_to_multiple_of": null, "pad_id": 1, "pad_type_id": 0, "pad_token": "<|pad|>"});
    });
    assert_eq!(loaded.encode(TEXT).unwrap(), whole.encode(TEXT).unwrap());
    assert_eq!(loaded.hash(), whole.hash());
}

#[test]
fn dropout_in_the_file_is_off() {
    let whole = small();
    for (dropout, kept) in [(0.3, Some(0.3)), (1.0, Some(1.0)), (0.0, None)] {
        let loaded = changed(&whole, |json| json["model"]["dropout"] = dropout.into());
        assert_eq!(loaded.dropout, kept);
        for _ in 0..20 {
            assert_eq!(loaded.encode(TEXT).unwrap(), whole.encode(TEXT).unwrap());
            assert_eq!(loaded.encode_marked(TEXT).unwrap(), whole.encode_marked(TEXT).unwrap());
        }
        let same_hash = loaded.hash() == whole.hash();
        assert!(same_hash || kept.is_none(), "a file that says 0 keeps the hash that it had");
    }
}

#[test]
fn ids_without_a_token_count_in_the_vocabulary_size() {
    let json = r#"{"version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": null,
        "added_tokens": [{"id": 9, "content": "</s>", "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false}],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 7, "</s>": 9}, "unk_token": "a"}}"#;
    let tokenizer = Tokenizer::from_bytes(json.as_bytes()).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.eos_id().unwrap()), (10, 9));
}

#[test]
fn training_on_a_corpus_takes_a_bounded_repeatable_sample() {
    let dir = tempfile::tempdir().unwrap();
    for (number, text) in texts().iter().enumerate() {
        fs::write(dir.path().join(format!("{number}.txt")), text).unwrap();
    }
    let corpus = Corpus::open(CorpusConfig::text(vec![dir.path().to_str().unwrap().into()])).unwrap();
    let train = |sample_bytes| {
        let vocab_size = 300;
        Tokenizer::train(&corpus, BpeConfig { vocab_size, sample_bytes })
    };
    assert_eq!(json(&train(9_000).unwrap()), json(&train(9_000).unwrap()));
    // With a bound above its size, all of the text is trained on.
    let all = json(&Tokenizer::train_on(texts().iter().map(String::as_str), 300).unwrap());
    assert_eq!(json(&train(u64::MAX).unwrap()), all);
    // A bound below one document leaves nothing to train on.
    refusal(train(10), "only 258 of the requested 300");
}

#[test]
fn the_fast_encoder_is_used_only_for_tokenizers_it_supports() {
    let tokenizer = small();
    assert!(tokenizer.fast.is_some());
    type Change = dyn Fn(&mut serde_json::Value);
    let changes: [&Change; 6] = [
        &|json| json["normalizer"] = serde_json::json!({"type": "NFC"}),
        &|json| json["pre_tokenizer"]["add_prefix_space"] = true.into(),
        &|json| json["pre_tokenizer"]["use_regex"] = false.into(),
        &|json| json["model"]["byte_fallback"] = true.into(),
        &|json| json["model"]["unk_token"] = "!".into(),
        &|json| json["added_tokens"][0]["special"] = false.into(),
    ];
    for (number, change) in changes.iter().enumerate() {
        assert!(changed(&tokenizer, change).fast.is_none(), "change {number}");
    }
}

/// The JSON of [`small`] with other ids for its last two tokens, and their names.
fn with_ids(ids: [u32; 2]) -> (serde_json::Value, [String; 2]) {
    let tokenizer = small();
    let names = [398, 399].map(|id| tokenizer.id_token(id).unwrap());
    let mut json: serde_json::Value = serde_json::from_str(&json(&tokenizer)).unwrap();
    for (name, id) in names.iter().zip(ids) {
        json["model"]["vocab"][name] = id.into();
    }
    (json, names)
}

#[test]
fn an_id_that_is_too_large_or_used_twice_is_refused_at_once() {
    let since = std::time::Instant::now();
    let read = |json: serde_json::Value| Tokenizer::from_bytes(json.to_string().as_bytes());
    for id in [i32::MAX as u32, u32::MAX, 1 << 24] {
        let (json, [token, _]) = with_ids([id, 500]);
        refusal(read(json), &format!("its token {token:?} has the id {id}, and ids must be below 16777216"));
    }
    let (json, _) = with_ids([420, 420]);
    refusal(read(json), "have the same id, 420");
    // The largest id that is allowed costs no more than a small one.
    let largest = read(with_ids([(1 << 24) - 1, 500]).0).unwrap();
    assert_eq!(largest.vocab_size(), 1 << 24);
    assert!(largest.to_json().unwrap().len() < 50_000);
    assert!(since.elapsed().as_secs() < 20, "{:?}", since.elapsed());
}

#[test]
fn the_json_of_a_tokenizer_with_missing_ids_is_what_the_crate_writes() {
    let (mut file, _) = with_ids([1000, 500]);
    file["model"]["dropout"] = 0.1.into();
    let tokenizer = Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.num_missing), (1001, 601));
    // The text that the `tokenizers` crate itself writes; it prints the missing ids to standard output too.
    let texts = [false, true].map(|is_pretty| tokenizer.marked.to_string(is_pretty).unwrap());
    assert_eq!(tokenizer.to_json().unwrap(), texts[1]);
    assert_eq!(tokenizer.hash(), xxh3_128(texts[0].as_bytes()));
    let again = Tokenizer::from_bytes(texts[1].as_bytes()).unwrap();
    assert_eq!(again.hash(), tokenizer.hash());
    assert_eq!(again.decode(&again.encode(TEXT).unwrap()).unwrap(), TEXT);
}

/// Splitting, normalising and added tokens as in Qwen's files: digits stand alone, `<think>` is found in every text.
#[test]
fn a_tokenizer_like_qwens_works() {
    let mut json: serde_json::Value = serde_json::from_str(&json(&small())).unwrap();
    json["normalizer"] = serde_json::json!({"type": "NFC"});
    let pattern = [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
    .concat();
    json["pre_tokenizer"] = serde_json::json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}]});
    let mut added = json["added_tokens"][0].clone();
    added["id"] = 400.into();
    added["content"] = "<think>".into();
    added["special"] = false.into();
    json["added_tokens"].as_array_mut().unwrap().push(added);
    let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 401);
    let ids = tokenizer.encode("cafe\u{301} 1234<think>").unwrap();
    assert_eq!(tokenizer.decode(&ids).unwrap(), "café 1234<think>");
    assert_eq!(ids.last(), Some(&400));
    let digits = ids[ids.len() - 5..ids.len() - 1].iter();
    let digits = digits.map(|&id| tokenizer.id_token(id).unwrap());
    assert_eq!(digits.collect::<Vec<_>>(), ["1", "2", "3", "4"]);
}

#[test]
fn the_token_that_a_template_puts_before_a_text_is_found() {
    let ids = |tokenizer: &Tokenizer| (tokenizer.bos_id(), tokenizer.prefix_id().ok());
    let llama = byte_fallback();
    assert_eq!(ids(&llama), (Some(1), Some(1)));
    let text = llama.encode("the").unwrap();
    assert_eq!(llama.encode_with_bos("the").unwrap(), [&[1], &text[..]].concat());
    // A template that puts a token after the text puts none before it.
    let behind = changed(&llama, |json| json["post_processor"]["single"].as_array_mut().unwrap().reverse());
    assert_eq!(ids(&behind), (None, Some(2)));
    assert_eq!(behind.encode_with_bos("the").unwrap(), text);
    assert_eq!(ids(&small()), (None, Some(0)));
}

fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let mut stream = tokenizer.decode_stream(&[]).unwrap();
    let mut pieces = ids.iter().map(|&id| stream.push(id).unwrap()).collect::<Vec<_>>();
    pieces.push(stream.finish().unwrap());
    pieces
}

#[test]
fn streaming_holds_back_characters_until_they_are_whole() {
    let bytes_only = Tokenizer::train_on(["a"].into_iter(), 258).unwrap();
    let ids = bytes_only.encode("a世👩b").unwrap();
    let wanted = ["a", "", "", "世", "", "", "", "👩", "b", ""];
    assert_eq!(stream(&bytes_only, &ids), wanted);
    // The ids end inside a character: its bytes become U+FFFD at the end.
    assert_eq!(stream(&bytes_only, &ids[..3]), ["a", "", "", "\u{fffd}"]);
    // Bytes outside UTF-8 do not block the text after them.
    let bad = bytes_only.encode("世").unwrap()[1];
    let pieces = stream(&bytes_only, &[&[bad; 400][..], &ids[..1]].concat());
    assert_eq!(pieces.concat(), "\u{fffd}".repeat(400) + "a");
    assert!(pieces[1..400].iter().all(|piece| piece == "\u{fffd}"));
    // A run of byte tokens is whole when another token follows: one bad byte makes U+FFFD of all of them.
    let bytes = byte_fallback();
    let mut ids = bytes.encode("a世").unwrap();
    assert_eq!(stream(&bytes, &ids), ["a", "", "", "", "世"]);
    ids.extend(bytes.encode("é").unwrap());
    assert_eq!(stream(&bytes, &ids), ["a", "", "", "", "世 ", "é", ""]);
    ids.splice(4..4, [3 + 0xFF]);
    let bad = "\u{fffd}".repeat(4);
    assert_eq!(stream(&bytes, &ids), ["a", "", "", "", "", &format!("{bad} "), "é", ""]);
}

/// A tokenizer like Llama's: byte tokens for characters without a token, and a first space that decoding removes.
fn byte_fallback() -> Tokenizer {
    Tokenizer::from_bytes(include_bytes!("../../../../tests/golden/llama_tokenizer.json")).unwrap()
}

#[test]
fn streaming_keeps_the_spaces_of_a_metaspace_tokenizer() {
    let json = r#"{"version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": [],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "post_processor": null,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "model": {"type": "WordLevel", "vocab": {"?": 0, "▁one": 1, "▁two": 2}, "unk_token": "?"}}"#;
    let tokenizer = Tokenizer::from_bytes(json.as_bytes()).unwrap();
    let ids = tokenizer.encode("one two one").unwrap();
    assert_eq!(ids, [1, 2, 1]);
    assert_eq!(stream(&tokenizer, &ids), ["one", " two", " one", ""]);
}

/// A tokenizer of these tokens, with this decoder. `[S]` is a special token.
fn with_decoder(tokens: &[&str], decoder: serde_json::Value) -> Tokenizer {
    let vocab: serde_json::Map<_, _> =
        tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id.into())).collect();
    let id = tokens.len();
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": decoder,
        "added_tokens": [{"id": id, "content": "[S]", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": tokens[0]},
    });
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

/// A tokenizer for each kind of decoder that published models have, with tokens that are hard for it.
fn decoders() -> Vec<(&'static str, Tokenizer)> {
    use serde_json::json;
    let sentence = [
        "?",
        "▁",
        "▁▁",
        "▁▁▁",
        "▁the",
        "er",
        "▁a▁b",
        "s▁",
        ".",
        "\n",
        "é",
        "<0xE4>",
        "<0xB8>",
        "<0x96>",
        "<0xC3>",
        "<0xA9>",
        "<0x41>",
        "<0x20>",
    ];
    let pieces = ["[UNK]", "the", "##er", "dog", "##s", ".", ",", "'", "##'", "t", "n", "n't", "do", "not", "é"];
    let bytes = ["Ġ", "Ġthe", "er", "ä", "¸", "ĸ", "Ã", "©", "Ċ", "ĠĠ", "A", "ðŁ", "ĳ", "©"];
    let words = ["the</w>", "er", "s</w>", ".</w>", "</w>", "é", "ab"];
    let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    let sequence = |last: Vec<serde_json::Value>| {
        let all = [vec![replace.clone(), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})], last].concat();
        json!({"type": "Sequence", "decoders": all})
    };
    let strip = |start: usize| json!({"type": "Strip", "content": " ", "start": start, "stop": 0});
    let metaspace = |scheme| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let word_piece = |cleanup| json!({"type": "WordPiece", "prefix": "##", "cleanup": cleanup});
    vec![
        ("Metaspace first", with_decoder(&sentence, metaspace("first"))),
        ("Metaspace always", with_decoder(&sentence, metaspace("always"))),
        ("Metaspace never", with_decoder(&sentence, metaspace("never"))),
        ("Llama 2", with_decoder(&sentence, sequence(vec![strip(1)]))),
        ("three spaces stripped", with_decoder(&sentence, sequence(vec![strip(3)]))),
        ("Gemma", with_decoder(&sentence, sequence(Vec::new()))),
        ("WordPiece", with_decoder(&pieces, word_piece(false))),
        ("WordPiece with cleanup", with_decoder(&pieces, word_piece(true))),
        ("bytes", with_decoder(&bytes[..13], byte_level)),
        ("BPE", with_decoder(&words, json!({"type": "BPEDecoder", "suffix": "</w>"}))),
        ("none", with_decoder(&sentence, json!(null))),
    ]
}

#[test]
fn a_continuation_keeps_its_first_space() {
    let decoders = decoders();
    let behind = |name: &str, prompt: &[&str], next: &str| {
        let (_, tokenizer) = decoders.iter().find(|(known, _)| *known == name).unwrap();
        let id = |token: &str| tokenizer.token_id(token).unwrap();
        let prompt: Vec<u32> = prompt.iter().map(|token| id(token)).collect();
        tokenizer.decode_behind(&prompt, &[id(next)]).unwrap()
    };
    for name in ["Metaspace first", "Metaspace always", "Metaspace never", "Llama 2", "Gemma"] {
        assert_eq!(behind(name, &["▁the"], "▁the"), " the", "{name}");
        assert_eq!(behind(name, &["[S]", "▁the", "[S]"], "▁▁▁"), "   ", "{name}");
        assert_eq!(behind(name, &["er"], "▁a▁b"), " a b", "{name}");
    }
    assert_eq!(behind("WordPiece", &["dog"], "the"), " the");
    assert_eq!(behind("WordPiece", &["dog"], "##s"), "s");
    assert_eq!(behind("bytes", &["er"], "Ġthe"), " the");
    assert_eq!(behind("BPE", &["the</w>"], "er"), " er");
    // Three spaces are stripped from the beginning of prompt and continuation together.
    assert_eq!(behind("three spaces stripped", &["▁"; 40], "▁the"), " the");
    assert_eq!(behind("three spaces stripped", &["▁"; 2], "▁the"), "the");
    // Without a prompt's text the first space is stripped, as from any text.
    assert_eq!(behind("Llama 2", &[], "▁the"), "the");
    assert_eq!(behind("Llama 2", &["[S]"], "▁the"), "the");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn decode_behind_gives_the_rest_of_the_whole_text_after_the_prompt(
        prompt in prop::collection::vec(0..19usize, 0..40),
        blank in 0..60usize,
        ids in prop::collection::vec(0..19usize, 0..40),
    ) {
        use std::sync::LazyLock;
        static DECODERS: LazyLock<Vec<(&str, Tokenizer)>> = LazyLock::new(decoders);
        for (name, tokenizer) in &*DECODERS {
            // A third of the prompts end with up to 19 tokens of id 1, which several of the tokenizers decode as
            // spaces.
            let of = |ids: &[usize]| ids.iter().map(|id| (id % tokenizer.vocab_size()) as u32).collect::<Vec<_>>();
            let mut prompt = of(&prompt);
            prompt.extend(vec![1; blank.saturating_sub(40)]);
            let ids = of(&ids);
            let text = |ids: &[u32]| tokenizer.decode(ids).unwrap();
            let (before, all) = (text(&prompt), text(&[&prompt[..], &ids].concat()));
            // A prompt that ends inside a character or a run of bytes may change.
            let same = all.chars().zip(before.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
            let expected = &all[same..];
            let is_plain = !before.ends_with(char::REPLACEMENT_CHARACTER) && !name.contains("Llama");
            // Special tokens have no text: a run of byte tokens goes on after them.
            let last = prompt.iter().rev().map(|id| tokenizer.id_token(*id).unwrap()).find(|token| token != "[S]");
            let byte = last.is_some_and(|token| is_byte_token(&token));
            prop_assert!(!is_plain || byte || all.starts_with(&before), "{name}: {before:?} {all:?}");
            let found = tokenizer.decode_behind(&prompt, &ids).unwrap();
            prop_assert_eq!(&found, expected, "{}: {:?} {:?}", name, &prompt, &ids);
        }
    }

    #[test]
    fn encoding_then_decoding_gives_the_text_back(text in any::<String>(), mixed in "[a世👩é \\n<|endoftext>]{0,60}") {
        use std::sync::LazyLock;
        static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(small);
        for text in [text, mixed] {
            let ids = TOKENIZER.encode(&text).unwrap();
            prop_assert!(ids.iter().all(|&id| (2..400).contains(&id)));
            prop_assert_eq!(&ids, &encode(&TOKENIZER.plain, &text).unwrap(), "the fast way differs");
            prop_assert_eq!(&TOKENIZER.decode(&ids).unwrap(), &text);
            prop_assert_eq!(stream(&TOKENIZER, &ids).concat(), text);
        }
    }

    #[test]
    fn streamed_pieces_join_to_the_text_and_token_bytes_add_up_to_its_length(
        text in any::<String>(),
        likely in "[ athe世👩é\n.]{0,40}",
        ids in prop::collection::vec(prop_oneof![0..300u32, 120..220u32, Just(2), Just(200)], 0..150),
    ) {
        use std::sync::LazyLock;
        static TOKENIZERS: LazyLock<[Tokenizer; 2]> = LazyLock::new(|| [small(), byte_fallback()]);
        for tokenizer in &*TOKENIZERS {
            prop_assert_eq!(stream(tokenizer, &ids).concat(), tokenizer.decode(&ids).unwrap(), "{:?}", ids);
            for text in [&text, &likely] {
                // SentencePiece decodes `▁` as a space, so a text that holds it would not be returned unchanged.
                let text = text.replace('▁', "");
                let ids = tokenizer.encode(&text).unwrap();
                prop_assert_eq!(&stream(tokenizer, &ids).concat(), &text);
                let bytes = ids.iter().enumerate().map(|(n, &id)| tokenizer.token_bytes(id, n == 0).unwrap());
                prop_assert_eq!(bytes.sum::<usize>(), text.len(), "{:?}", text);
            }
        }
    }
}

/// Tokenizers of three forms: byte level, byte fallback as in Llama's, and words that are joined by spaces.
fn of_three_forms() -> [Tokenizer; 3] {
    let golden = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
        Tokenizer::from_file(&path).unwrap()
    };
    let words = changed(&small(), |json| {
        json["decoder"] = serde_json::Value::Null;
        json["pre_tokenizer"] = serde_json::json!({"type": "WhitespaceSplit"});
    });
    [small(), golden("llama_tokenizer.json"), words]
}

#[test]
fn bytes_of_tokens_behind_one_another_are_the_text_of_the_decoder() {
    for (form, tokenizer) in of_three_forms().iter().enumerate() {
        let bytes = tokenizer.bytes_of_tokens().unwrap();
        assert_eq!(bytes.len(), tokenizer.vocab_size());
        let plain = tokenizer.plain_token.unwrap();
        let mut random = sieve_testing::Random(5);
        let mut num_whole = 0;
        for round in 0..3000 {
            let ids: Vec<u32> = match round % 2 {
                0 => (0..1 + random.below(8)).map(|_| random.below(bytes.len()) as u32).collect(),
                _ => {
                    let text: String = TEXT.chars().skip(random.below(60)).take(1 + random.below(20)).collect();
                    tokenizer.encode(&text).unwrap()
                }
            };
            let joined = ids.iter().flat_map(|&id| bytes[id as usize].clone()).collect();
            // Bytes that are no UTF-8 have no text of their own.
            if let Ok(joined) = String::from_utf8(joined) {
                num_whole += 1;
                assert_eq!(tokenizer.decode_behind(&[plain], &ids).unwrap(), joined, "{form}: {ids:?}");
            }
        }
        assert!(num_whole > 1000, "{form}: {num_whole}");
        // Special tokens are in no text.
        let special = tokenizer.special_tokens();
        assert!(!special.is_empty());
        assert!(special.iter().all(|name| bytes[tokenizer.token_id(name).unwrap() as usize].is_empty()), "{form}");
    }
    let cleans_up = changed(&small(), |json| {
        json["decoder"] = serde_json::json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    });
    assert_eq!(cleans_up.bytes_of_tokens(), None);
}
