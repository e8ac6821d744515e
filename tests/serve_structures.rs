//! Answers of `sieve serve` with a structure: JSON, a schema, an expression or a choice, of models with random weights.
use crate::random_model::{VOCAB_SIZE, random_model, recipe_with_context, write_checkpoint};
use crate::serve::{Answer, Served, events};
use crate::tasks_cli::DENSE;
use crate::tiny_run::TinyRun;
use crate::words_model;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// A tokenizer of all characters that a keyboard has, a token each, a new line, and the end token.
fn characters() -> Value {
    let written = |byte: u8| match byte {
        // The names of GPT-2's alphabet.
        b' ' => 'Ġ',
        b'\n' => 'Ċ',
        byte => char::from(byte),
    };
    let mut vocab: serde_json::Map<String, Value> =
        (b' '..=b'~').chain([b'\n']).zip(0..).map(|(byte, id)| (written(byte).to_string(), Value::from(id))).collect();
    let end = vocab.len();
    assert_eq!(end + 1, VOCAB_SIZE);
    vocab.insert("<|endoftext|>".to_owned(), end.into());
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [{"id": end, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false},
    })
}

/// A model of random weights that writes characters, and a server of it.
fn served() -> (TinyRun, Served) {
    let tiny = TinyRun::new("kind = \"mha\"");
    let recipe = recipe_with_context(DENSE[0], DENSE[1], 512);
    write_checkpoint(&tiny.path("run"), &recipe, &random_model(&recipe, 11));
    tiny.write("characters.json", characters().to_string());
    let served = Served::new(&tiny, "run", "--tokenizer characters.json");
    (tiny, served)
}

fn asked(served: &Served, more: &Value) -> Answer {
    let mut body = json!({"prompt": "An answer: ", "max_tokens": 400});
    more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
    served.send("POST", "/v1/completions", "", body.to_string().as_bytes())
}

/// The choices of an answer.
fn choices(served: &Served, more: &Value) -> Vec<Value> {
    let answer = asked(served, more);
    assert_eq!(answer.0, 200, "{}", answer.1);
    let answer: Value = serde_json::from_str(&answer.1).expect("JSON");
    answer["choices"].as_array().expect("a list").clone()
}

fn text(choice: &Value) -> &str {
    choice["text"].as_str().expect("a text")
}

/// A schema without a long answer.
fn person() -> Value {
    json!({
        "type": "object", "additionalProperties": false, "required": ["name", "age", "tags"],
        "properties": {
            "name": {"type": "string", "maxLength": 12, "pattern": "^[A-Za-z ]*$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 3},
        },
    })
}

fn is_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let name = value["name"].as_str().unwrap_or_else(|| panic!("{text}"));
    assert!(name.len() <= 12 && name.chars().all(|c| c.is_ascii_alphabetic() || c == ' '), "{text}");
    assert!(value["age"].as_u64().is_some_and(|age| age <= 130), "{text}");
    let tags = value["tags"].as_array().unwrap_or_else(|| panic!("{text}"));
    assert!(tags.len() <= 3 && tags.iter().all(|tag| tag == "new" || tag == "old"), "{text}");
    assert_eq!(value.as_object().map(serde_json::Map::len), Some(3), "{text}");
}

#[test]
fn texts_of_a_random_model_have_the_structure_that_is_asked_for() {
    let (_tiny, served) = served();
    let of_schema =
        json!({"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": person()}});
    let mut num_objects = 0;
    for seed in 0..30 {
        let found = choices(&served, &json!({"response_format": of_schema, "seed": seed}));
        assert_eq!(found[0]["finish_reason"], "stop", "{}", found[0]);
        is_person(text(&found[0]));
        // Of any object, many are longer than the context; a text that has stopped is whole.
        for choice in choices(&served, &json!({"response_format": {"type": "json_object"}, "seed": seed, "top_k": 20}))
        {
            let whole = match serde_json::from_str::<Value>(text(&choice)) {
                Ok(value) => value.is_object(),
                // JSON has no largest number, and serde_json has one.
                Err(error) => error.to_string().starts_with("number out of range"),
            };
            assert_eq!(whole, choice["finish_reason"] == "stop", "{choice}");
            num_objects += usize::from(whole);
        }
        let outputs = json!({"structured_outputs": {"regex": "[a-f]{3}(-[0-9]{2})?"}, "seed": seed});
        let found = choices(&served, &outputs);
        let (letters, digits) = text(&found[0]).split_at(3);
        assert!(letters.bytes().all(|byte| (b'a'..=b'f').contains(&byte)), "{}", found[0]);
        let is_right = |digits: &str| digits.len() == 3 && digits[1..].bytes().all(|byte| byte.is_ascii_digit());
        assert!(digits.is_empty() || (digits.starts_with('-') && is_right(digits)), "{}", found[0]);
        let choice = json!({"structured_outputs": {"choice": ["yes", "no", "perhaps"]}, "seed": seed});
        let found = choices(&served, &choice);
        assert!(
            ["yes", "no", "perhaps"].contains(&text(&found[0])) && found[0]["finish_reason"] == "stop",
            "{found:?}"
        );
    }
    assert!(num_objects >= 5, "{num_objects} of 30 objects ended");
    // Greedy decoding, a schema as a string, penalties, and `n` texts of one schema.
    let as_text = json!({"structured_outputs": {"json": person().to_string()}, "temperature": 0});
    is_person(text(&choices(&served, &as_text)[0]));
    let penalised = json!({"response_format": of_schema, "n": 5, "seed": 3, "frequency_penalty": 0.5, "min_p": 0.01});
    let found = choices(&served, &penalised);
    found.iter().for_each(|choice| is_person(text(choice)));
    assert!(found.iter().any(|choice| text(choice) != text(&found[0])), "{found:?}");
    // Fewer tokens than the structure needs.
    let short = choices(&served, &json!({"response_format": of_schema, "max_tokens": 5, "seed": 1}));
    assert_eq!((text(&short[0]).len(), &short[0]["finish_reason"]), (5, &json!("length")));
    served.stop();
}

#[test]
fn streams_and_samples_with_a_structure_are_those_of_whole_answers_and_neighbours_keep_their_bits() {
    let (_tiny, served) = served();
    let format = json!({"type": "json_schema", "json_schema": {"name": "person", "schema": person()}});
    let body = json!({"response_format": format, "n": 3, "seed": 7, "logprobs": 1});
    let whole = choices(&served, &body);
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let chunks = events(&asked(&served, &streamed));
    for (index, choice) in whole.iter().enumerate() {
        let own = || chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
        assert_eq!(text(choice), own().map(text).collect::<String>());
        assert_eq!(own().next_back().expect("chunks")["finish_reason"], choice["finish_reason"]);
        // A sample is the text of its own seed.
        let alone = choices(&served, &json!({"response_format": format, "seed": 7 + index, "logprobs": 1}));
        assert_eq!((&alone[0]["text"], &alone[0]["logprobs"]), (&choice["text"], &choice["logprobs"]));
        // Log-probabilities are over all tokens, so that another may have a larger one.
        let tokens = choice["logprobs"]["token_logprobs"].as_array().expect("a list");
        assert!(tokens.iter().any(|value| value.as_f64().is_some_and(|value| value < -3.0)), "{tokens:?}");
    }
    let plain = json!({"max_tokens": 120, "seed": 4, "logprobs": 0, "stop": []});
    let alone = choices(&served, &plain);
    std::thread::scope(|scope| {
        let beside: Vec<_> = (0..4).map(|_| scope.spawn(|| choices(&served, &body))).collect();
        let again: Vec<_> = (0..3).map(|_| scope.spawn(|| choices(&served, &plain))).collect();
        beside.into_iter().for_each(|one| assert_eq!(one.join().expect("an answer"), whole));
        again.into_iter().for_each(|one| assert_eq!(one.join().expect("an answer"), alone));
    });
    served.stop();
}

#[test]
fn structures_that_cannot_be_used_are_refused_with_a_sentence() {
    let (tiny, served) = served();
    let schema = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}});
    let outputs = |outputs: Value| json!({"structured_outputs": outputs});
    let deep = (0..10_000).fold(String::new(), |deep, _| deep + "{\"items\":") + "{}" + &"}".repeat(10_000);
    for (body, words) in [
        (json!({"response_format": "json"}), "response_format is not an object"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type is not"),
        (json!({"response_format": {"type": "json_object", "schema": {}}}), "the field response_format.schema"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema is missing"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
            "json_schema.schema is missing",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": 3, "schema": {}}}}),
            "name is not a string",
        ),
        (schema(json!(3)), "schema must be an object or boolean"),
        (schema(json!(false)), "schema is false"),
        (schema(json!({"type": "text"})), "Invalid type: text"),
        (schema(json!({"not": {}})), "not"),
        (schema(json!({"oneOf": [{"type": "string"}, {"minLength": 3}]})), "write anyOf in place of oneOf"),
        (schema(json!({"type": "number", "multipleOf": 1_000_003})), "digits of multipleOf"),
        (schema(json!({"required": (0..500).map(|n| n.to_string()).collect::<Vec<_>>()})), "the limit is 400"),
        (schema(json!({"$ref": "https://example.com/x"})), "$ref"),
        (schema(json!({"description": "x".repeat(70_000)})), "use at most 65536"),
        (outputs(json!({"regex": "[a-"})), "the structure cannot be used"),
        (outputs(json!({"choice": []})), "a list of 1 to 1024 strings"),
        (outputs(json!({"choice": ["a", ""]})), "none of them empty"),
        (outputs(json!({"choice": "a"})), "a list of 1 to 1024 strings"),
        (outputs(json!({"grammar": "root ::= x"})), "has no structured_outputs.grammar"),
        (outputs(json!({"structural_tag": "{}"})), "has no structured_outputs.structural_tag"),
        (outputs(json!({"whitespace_pattern": " "})), "has no structured_outputs.whitespace_pattern"),
        (outputs(json!({"json": "{"})), "structured_outputs.json is not valid JSON"),
        (outputs(json!({"json": deep})), "recursion limit exceeded"),
        (outputs(json!({"regex": "a", "choice": ["a"]})), "exactly one of"),
        (outputs(json!({})), "exactly one of"),
        (outputs(json!({"rejex": "a"})), "structured_outputs.rejex"),
        (json!({"guided_json": {}}), "does not know the field guided_json"),
        (
            json!({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}),
            "leave out response_format or structured_outputs",
        ),
    ] {
        let begun = Instant::now();
        let answer = asked(&served, &body);
        assert!(begun.elapsed() < Duration::from_secs(1), "{words}: {:?}", begun.elapsed());
        let error: Value = serde_json::from_str(&answer.1).expect("JSON");
        let message = error["error"]["message"].as_str().unwrap_or_default();
        assert!(answer.0 == 400 && message.contains(words), "{words}: {} {}", answer.0, answer.1);
        let param = error["error"]["param"].as_str().expect("a field").to_owned();
        assert!(body.as_object().expect("fields").keys().any(|name| param.starts_with(name.as_str())), "{param}");
    }
    // A body of this depth, and of 4 MiB.
    let body = format!("{{\"prompt\": \"x\", \"response_format\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    let answer = served.send("POST", "/v1/completions", "", body.as_bytes());
    assert!(answer.0 == 400 && answer.1.contains("recursion limit exceeded"), "{}", answer.1);
    let begun = Instant::now();
    let answer = asked(&served, &schema(json!({"enum": ["x".repeat((4 << 20) - 400)]})));
    assert!(answer.0 == 400 && answer.1.contains("use at most 65536"), "{}", answer.1);
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    // A schema that refers to itself is served; a text that cannot go on ends with a sentence.
    let nested = json!({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}]});
    for choice in choices(&served, &schema(nested)) {
        assert!(
            serde_json::from_str::<Value>(text(&choice)).is_ok() || choice["finish_reason"] == "length",
            "{choice}"
        );
    }
    let begun = Instant::now();
    assert!(text(&choices(&served, &outputs(json!({"regex": "(a{1000}){1000}"})))[0]).bytes().all(|byte| byte == b'a'));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    let answer = asked(&served, &outputs(json!({"regex": "a語"})));
    assert!(answer.0 == 400 && answer.1.contains("no token of the model's vocabulary continues it"), "{}", answer.1);
    served.stop();
    // Words that are joined by spaces have structures, too.
    let words = Served::new(&tiny, "run", "");
    let body = json!({"prompt": "t1 t2", "structured_outputs": {"choice": [" t5 t9", " t5 t7 t8"]}});
    assert!([" t5 t9", " t5 t7 t8"].contains(&text(&choices(&words, &body)[0])));
    words.stop();
}

#[test]
fn a_text_goes_on_behind_end_tokens_where_they_are_ignored() {
    let (_tiny, served) = served();
    // Of 97 tokens one is the end: among 400 drawn evenly it is certain to come.
    let usual = json!({"temperature": 1.9, "seed": 3});
    let ended = choices(&served, &usual);
    assert_eq!(ended[0]["finish_reason"], "stop");
    let mut all = usual.clone();
    all["ignore_eos"] = true.into();
    let went_on = choices(&served, &all);
    assert_eq!(went_on[0]["finish_reason"], "length");
    assert!(text(&went_on[0]).starts_with(text(&ended[0])), "the texts are equal up to the end token");
    all["response_format"] = json!({"type": "json_object"});
    let answer = asked(&served, &all);
    assert_eq!(answer.0, 400, "{}", answer.1);
    assert!(answer.1.contains("leave ignore_eos out"), "{}", answer.1);
}

#[test]
fn chats_have_structures_too() {
    let tiny = TinyRun::new("kind = \"mha\"");
    words_model::write(&tiny);
    let served = Served::new(&tiny, "metaspace", "");
    let answers = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "What?"}], "temperature": 0});
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        let answer = served.send("POST", "/v1/chat/completions", "", body.to_string().as_bytes());
        let content: Value = serde_json::from_str(&answer.1).expect("JSON");
        (answer.0, content["choices"][0].clone())
    };
    let (_, free) = answers(json!({"response_format": {"type": "text"}}));
    assert_eq!(free["message"]["content"], " Paris");
    let (_, chosen) = answers(json!({"structured_outputs": {"choice": [" dog jumps", " dog"]}, "max_tokens": 9}));
    // The model ends its text after these two words.
    assert_eq!((&chosen["message"]["content"], &chosen["finish_reason"]), (&json!(" dog jumps"), &json!("stop")));
    // The vocabulary has no brace.
    assert_eq!(answers(json!({"response_format": {"type": "json_object"}})).0, 400);
    served.stop();
}

#[test]
fn log_probabilities_beyond_the_memory_of_answers_are_refused_before_the_work() {
    let (_tiny, served) = served();
    let many = json!({"prompt": vec!["An answer: "; 8], "n": 128, "logprobs": 20});
    let refused = asked(&served, &many);
    assert_eq!((refused.0, &refused.json()["error"]["param"]), (400, &json!("logprobs")), "{}", refused.1);
    // 8 prompts, 128 texts of each, 400 tokens, 21 numbers a token.
    assert!(refused.1.contains("8601600 log-probabilities, and the limit is 2097152"), "{}", refused.1);
    let echoed = json!({"prompt": vec!["ab".repeat(250); 1000], "max_tokens": 0, "echo": true, "logprobs": 20});
    assert_eq!(asked(&served, &echoed).0, 400);
    assert_eq!(asked(&served, &json!({"max_tokens": 4, "logprobs": 20})).0, 200);
}
