use super::*;
use sieve_testing::Random;
use std::time::{Duration, Instant};

/// A byte-level vocabulary with merges, and its end token.
fn grammars() -> (Grammars, Arc<Tokenizer>, u32) {
    let texts = [r#"{"name": "größe", "list": [1, 2.5, true, null], "语": {"a": "b"}} and words "#.repeat(40)];
    let tokenizer = Arc::new(Tokenizer::train_on(texts.iter().map(String::as_str), 290).expect("trains"));
    let end = tokenizer.eos_id().expect("an end token");
    (Grammars::new(tokenizer.clone(), tokenizer.vocab_size(), &[end]), tokenizer, end)
}

/// A text of tokens that are drawn evenly among those allowed; `None` if it has not ended after `most`.
fn written(mut grammar: Grammar, tokenizer: &Tokenizer, end: u32, seed: u64, most: usize) -> Option<String> {
    let (mut random, mut ids) = (Random(seed), Vec::new());
    for _ in 0..most {
        let allowed = grammar.allowed().unwrap_or_else(|| panic!("{:?}", grammar.failure()));
        // The end comes as soon as it may, so that most texts have one.
        let token = if allowed.contains(&end) { end } else { allowed[random.below(allowed.len())] };
        grammar.take(token);
        assert!(grammar.failure().is_none(), "{:?}", grammar.failure());
        ids.extend(Some(token).filter(|token| *token != end));
        if grammar.has_ended() {
            return Some(tokenizer.decode(&ids).expect("it decodes"));
        }
        assert_ne!(token, end, "the end token ends the text");
    }
    None
}

#[test]
fn texts_of_random_tokens_have_their_structure() {
    let (grammars, tokenizer, end) = grammars();
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["kind", "size"],
        "properties": {
            "kind": {"enum": ["small", "groß"]},
            "size": {"type": "integer", "minimum": 3, "maximum": 20},
            "next": {"anyOf": [{"$ref": "#/$defs/end"}, {"type": "null"}]},
        },
        "$defs": {"end": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    });
    let grammar = |structure| grammars.compile(&structure).expect("it can be used");
    let of_schema = grammar(Structure::Schema(schema));
    let of_regex = grammar(Structure::Regex("[a-cé]{2,4}-[0-9]+".to_owned()));
    let of_choice = grammar(Structure::Choice(["yes", "yes, sir", "no"].map(str::to_owned).to_vec()));
    let of_object = grammar(Structure::JsonObject);
    let (mut whole, mut chosen) = (0, Vec::new());
    for seed in 0..60 {
        if let Some(text) = written(of_schema.clone(), &tokenizer, end, seed, 400) {
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert!(["small", "groß"].map(Value::from).contains(&value["kind"]), "{text}");
            assert!((3..=20).contains(&value["size"].as_i64().expect("an integer")), "{text}");
            let next = value.get("next").filter(|next| !next.is_null());
            let is_right = |next: &Vec<Value>| next.len() <= 2 && next.iter().all(Value::is_boolean);
            assert!(next.is_none_or(|next| next.as_array().is_some_and(is_right)), "{text}");
            assert!(value.as_object().expect("an object").keys().all(|key| ["kind", "size", "next"].contains(&&**key)));
            whole += 1;
        }
        if let Some(text) = written(of_object.clone(), &tokenizer, end, seed, 400) {
            // JSON has no largest number, and serde_json has one.
            match serde_json::from_str::<Value>(&text) {
                Ok(value) => assert!(value.is_object(), "{text}"),
                Err(error) => assert!(error.to_string().starts_with("number out of range"), "{error}: {text}"),
            }
            whole += 1;
        }
        let text = written(of_regex.clone(), &tokenizer, end, seed, 20).expect("it ends");
        let (letters, digits) = text.split_once('-').expect("a hyphen");
        assert!((2..=4).contains(&letters.chars().count()) && letters.chars().all(|c| "abcé".contains(c)), "{text}");
        assert!(!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()), "{text}");
        chosen.extend(written(of_choice.clone(), &tokenizer, end, seed, 20));
    }
    assert!(whole > 60, "{whole} of 120 texts ended");
    // The end token came as soon as it could.
    assert!(chosen.len() == 60 && ["yes", "no"].iter().all(|text| chosen.contains(&(*text).to_owned())));
}

#[test]
fn a_text_that_nothing_may_follow_ends_without_an_end_token() {
    let (grammars, tokenizer, end) = grammars();
    let mut grammar = grammars.compile(&Structure::Choice(vec!["no".to_owned()])).expect("a choice");
    let mut other = grammar.clone();
    for id in tokenizer.encode("no").expect("it encodes") {
        assert!(!grammar.has_ended() && !grammar.allowed().expect("tokens").contains(&end));
        grammar.take(id);
    }
    assert!(grammar.has_ended() && grammar.failure().is_none());
    // A clone is another text.
    assert!(!other.has_ended() && other.allowed().is_some());
}

#[test]
fn a_vocabulary_that_cannot_go_on_says_so() {
    // Byte fallback: each character has tokens, if only of its bytes.
    let tokenizer = Arc::new(crate::test_model::llama_tokenizer());
    let end = tokenizer.token_id("</s>").expect("an end token");
    let grammars = |num_tokens| Grammars::new(tokenizer.clone(), num_tokens, &[end]);
    let whole = grammars(tokenizer.vocab_size());
    let of_bytes = whole.compile(&Structure::Regex("語+".to_owned())).expect("it has the bytes");
    let text = written(of_bytes, &tokenizer, end, 1, 12).expect("it ends");
    assert!(text.chars().all(|c| c == '語'), "{text}");
    // Without most of its tokens it lacks them.
    let few = grammars(3);
    let refused = few.compile(&Structure::JsonObject).expect_err("no brace").to_string();
    assert!(refused.contains("no token of the model's vocabulary continues it"), "{refused}");
}

#[test]
fn structures_cost_little_or_are_refused() {
    let (grammars, ..) = grammars();
    let schema = |schema: Value| Structure::Schema(schema);
    let regex = |regex: &str| Structure::Regex(regex.to_owned());
    let names = |count: usize| (0..count).map(|n| format!("p{n}"));
    let nested = |depth: usize| (0..depth).fold(json!({"type": "string"}), |inside, _| json!({"items": inside}));
    // Each definition refers twice to the next one.
    let doubling = |word: &str| {
        let mut defs: serde_json::Map<_, _> = (0..40)
            .map(|n| {
                let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
                (format!("d{n}"), json!({word: [next, next]}))
            })
            .collect();
        defs.insert("d40".to_owned(), json!({"type": "string"}));
        json!({"$ref": "#/$defs/d0", "$defs": defs})
    };
    for (name, structure) in [
        ("bytes", schema(json!({"description": "x".repeat(4 << 20)}))),
        ("depth", schema(nested(100))),
        ("repetition", regex("(a{1000}){1000}")),
        ("repetitions", regex("((a{1,300}b{1,300}){1,300}c){1,300}")),
        ("states", regex("(a|b)*a(a|b){200}")),
        ("overlap", regex("(.*a.*b.*c.*d.*e.*f.*){20}")),
        ("groups", regex(&"(".repeat(30_000))),
        ("unicode", regex(r"(\p{L}{1,100}\w{1,100}){100}")),
        ("broken", regex("[a-")),
        ("empty", regex("")),
        ("look", regex("(?=a)b")),
        ("back", regex(r"(a)\1")),
        ("itself", schema(json!({"$ref": "#"}))),
        ("recursion", schema(json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}))),
        ("both", schema(doubling("allOf"))),
        ("either", schema(doubling("anyOf"))),
        ("one", schema(doubling("oneOf"))),
        ("items", schema(json!({"type": "array", "minItems": 1_000_000_000}))),
        ("up to", schema(json!({"type": "array", "items": {"type": "object"}, "maxItems": 100_000_000}))),
        ("length", schema(json!({"type": "string", "minLength": 1_000_000, "maxLength": 100_000_000}))),
        ("pattern", schema(json!({"type": "string", "pattern": "(a{1000}){1000}"}))),
        (
            "patterns",
            schema(json!({"type": "object", "patternProperties":
            names(200).map(|n| (format!("^({n}.*){{9}}"), json!({}))).collect::<Value>()})),
        ),
        ("multiple", schema(json!({"type": "integer", "multipleOf": 1_000_003, "minimum": -5}))),
        (
            "properties",
            schema(names(4000).map(|n| (n, json!({}))).collect::<serde_json::Map<_, _>>().into_iter().fold(
                json!({"type": "object", "properties": {}}),
                |mut all, (n, one)| {
                    all["properties"][n] = one;
                    all
                },
            )),
        ),
        ("required", schema(json!({"type": "object", "required": names(4000).collect::<Vec<_>>()}))),
        ("enum", schema(json!({"enum": names(6000).collect::<Vec<_>>()}))),
        ("count", schema(json!({"type": "object", "minProperties": 1_000_000}))),
        ("not", schema(json!({"not": {"type": "string"}}))),
        ("never", schema(json!(false))),
        ("number", schema(json!(3))),
        ("elsewhere", schema(json!({"$ref": "https://example.com/schema"}))),
        ("missing", schema(json!({"$ref": "#/$defs/none"}))),
        (
            "all patterns",
            schema(json!({"allOf": (0..200).map(|n| json!({"pattern": format!("a{{0,{n}}}.*{n}")}))
            .collect::<Vec<_>>()})),
        ),
        ("two patterns", schema(json!({"allOf": [{"pattern": "^.*a.{200}$"}, {"pattern": "^.*b.{300}c$"}]}))),
        ("decimals", schema(json!({"type": "number", "multipleOf": 1.000_003}))),
        ("power", schema(json!({"type": "number", "multipleOf": 1e30}))),
        ("choices", Structure::Choice(names(5000).map(|n| n.repeat(9)).collect())),
    ] {
        let begun = Instant::now();
        let compiled = grammars.compile(&structure);
        let (seconds, mut slowest) = (begun.elapsed(), Duration::ZERO);
        let outcome = match compiled {
            Err(error) => format!("refused: {error}"),
            Ok(mut grammar) => {
                let mut random = Random(1);
                for _ in 0..40 {
                    let begun = Instant::now();
                    let Some(allowed) = grammar.allowed() else { break };
                    grammar.take(allowed[random.below(allowed.len())]);
                    slowest = slowest.max(begun.elapsed());
                    if grammar.has_ended() || grammar.failure().is_some() {
                        break;
                    }
                }
                format!("taken; {}", grammar.failure().map_or_else(String::new, |error| error.to_string()))
            }
        };
        assert!(seconds < Duration::from_secs(1) && slowest < Duration::from_millis(250), "{name}: {outcome}");
    }
    assert!(grammars.has_room());
}

#[test]
fn grammars_in_use_are_counted_once_with_their_clones() {
    let (grammars, ..) = grammars();
    let one = || grammars.compile(&Structure::JsonObject).expect("JSON");
    let mut all: Vec<Grammar> = (0..MOST_GRAMMARS - 1).map(|_| one()).collect();
    all.push(all[0].clone());
    assert!(grammars.has_room());
    all.push(one());
    assert!(!grammars.has_room());
    all.pop();
    assert!(grammars.has_room());
}

#[test]
fn an_expression_that_ends_in_a_backslash_is_refused() {
    let (grammars, ..) = grammars();
    let compiled = |regex: &str| grammars.compile(&Structure::Regex(regex.to_owned())).map(drop);
    let error = compiled(r"a\").expect_err("nothing is escaped").to_string();
    assert!(error.contains("ends in a backslash"), "{error}");
    compiled(r"a\\").expect("an escaped backslash");
}

/// Whole numbers near those that decide, as JSON.
fn wholes() -> Vec<Value> {
    let powers = [0_u32, 52, 53, 54, 60, 62, 63, 64, 70].map(|power| 1_i128 << power);
    let near = powers.into_iter().flat_map(|power| (-3..=3).map(move |more| power + more));
    let near = near.chain([10_i128.pow(18), 10_i128.pow(18) + 1, 10_i128.pow(20)]);
    let signed = near.flat_map(|whole| [whole, -whole]);
    signed.map(|whole| serde_json::from_str(&whole.to_string()).expect("a number")).collect()
}

#[test]
fn whole_numbers_of_any_size_are_met_or_refused() {
    let (grammars, tokenizer, end) = grammars();
    let exact = |number: &Value| number.to_string().parse::<i128>().ok();
    let (mut met, mut refused) = (0, 0);
    let mut random = Random(3);
    let mut tried = |schema: Value, holds: &dyn Fn(i128) -> bool| {
        match grammars.compile(&Structure::Schema(schema.clone())) {
            Err(_) => refused += 1,
            Ok(grammar) => {
                for seed in 0..3 {
                    let text = written(grammar.clone(), &tokenizer, end, seed, 60).unwrap_or_default();
                    let Ok(whole) = text.parse::<i128>() else { continue };
                    assert!(holds(whole), "{text} by {schema}");
                    met += 1;
                }
            }
        };
    };
    let wholes = wholes();
    for one in &wholes {
        // Numbers that JSON's reader gives a fraction are no longer exact.
        let Some(is) = exact(one) else {
            for name in ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "const"] {
                grammars.compile(&Structure::Schema(json!({"type": "integer", name: one}))).map(drop).ok();
            }
            continue;
        };
        tried(json!({"type": "integer", "minimum": one}), &|whole| whole >= is);
        tried(json!({"type": "integer", "maximum": one}), &|whole| whole <= is);
        tried(json!({"type": "integer", "exclusiveMinimum": one}), &|whole| whole > is);
        tried(json!({"type": "integer", "exclusiveMaximum": one}), &|whole| whole < is);
        tried(json!({"const": one}), &|whole| whole == is);
        tried(json!({"type": "integer", "enum": [one]}), &|whole| whole == is);
        let other = &wholes[random.below(wholes.len())];
        let Some(to) = exact(other) else { continue };
        tried(json!({"type": "integer", "minimum": one, "maximum": other}), &|whole| (is..=to).contains(&whole));
        tried(json!({"type": "integer", "minimum": one, "exclusiveMaximum": other}), &|whole| {
            (is..to).contains(&whole)
        });
    }
    assert!(met > 500 && refused > 100, "{met} met, {refused} refused");
    // What programs write for 64 bits of their own.
    for most in [i64::MAX as u64, u64::MAX] {
        let schema = json!({"type": "integer", "minimum": 0, "maximum": most});
        grammars.compile(&Structure::Schema(schema)).expect("no limit of 64 bits");
    }
    let error = grammars.compile(&Structure::Schema(json!({"type": "integer", "minimum": i64::MIN})));
    let error = error.expect_err("it has no negative").to_string();
    assert!(error.contains("minimum is -9223372036854775808, which 64 bits do not hold both as"), "{error}");
}

#[test]
fn chains_of_references_end_in_their_schema_or_are_refused() {
    let (grammars, tokenizer, end) = grammars();
    for (open, close) in [("", ""), (r#"{"items":"#, "}"), (r#"{"allOf":["#, "]}")] {
        let link = |n: usize| format!(r##""{n:03x}":{open}{{"$ref":"#/{:03x}"}}{close},"##, n + 1);
        let compiled = |links: usize| {
            let chain = (0..links).map(link).collect::<String>();
            let schema = format!(r##"{{{chain}"{links:03x}":{{"const":7}},"$ref":"#/000"}}"##);
            grammars.compile(&Structure::Schema(serde_json::from_str(&schema).expect("JSON")))
        };
        let short = written(compiled(20).expect("a short chain"), &tokenizer, end, 1, 99);
        assert!(!open.is_empty() || short.as_deref() == Some("7"), "{short:?}");
        // As many links of a few bytes as a schema may hold.
        if let Err(error) = compiled((MOST_STRUCTURE_BYTES - 99) / link(0).len()) {
            assert!(error.to_string().contains("make it smaller"), "{error}");
        }
    }
}

#[test]
fn numbers_that_several_multiples_divide_are_met_or_refused() {
    let (grammars, tokenizer, end) = grammars();
    let multiples = ["1", "3", "16", "250", "9998", "9999", "0.5", "0.12", "0.003", "1e-4", "2e-6", "1e-9"];
    let (mut met, mut refused) = (0, 0);
    for (at, one) in multiples.iter().enumerate() {
        for other in &multiples[at..] {
            let schema = format!(
                r#"{{"allOf": [{{"type": "number", "multipleOf": {one}, "minimum": 1}}, {{"multipleOf": {other}}}]}}"#
            );
            let schema = serde_json::from_str(&schema).expect("JSON");
            let Ok(grammar) = grammars.compile(&Structure::Schema(schema)) else {
                refused += 1;
                continue;
            };
            for seed in 0..3 {
                // A text may be cut off or too long, and a grammar run out of fuel, but no text is wrong.
                let Some(text) = any_text(grammar.clone(), &tokenizer, end, seed) else { continue };
                let value: f64 = text.parse().expect("a number");
                for multiple in [one, other] {
                    let times = value / multiple.parse::<f64>().expect("a number");
                    assert!((times - times.round()).abs() < 1e-6 * times, "{text} by {one} and {other}");
                }
                met += 1;
            }
        }
    }
    assert!(met > 60 && refused > 5, "{met} met, {refused} refused");
}

/// As [`written`], of up to 12 tokens; `None`, too, where the grammar gives up.
fn any_text(mut grammar: Grammar, tokenizer: &Tokenizer, end: u32, seed: u64) -> Option<String> {
    let (mut random, mut ids) = (Random(seed), Vec::new());
    for _ in 0..12 {
        let allowed = grammar.allowed()?;
        let token = if allowed.contains(&end) { end } else { allowed[random.below(allowed.len())] };
        grammar.take(token);
        ids.extend(Some(token).filter(|token| *token != end));
        if grammar.has_ended() {
            return tokenizer.decode(&ids).ok();
        }
    }
    None
}

/// Whether a text may be written under a schema from its first token to its last.
fn takes(grammars: &Grammars, tokenizer: &Tokenizer, schema: &Value, text: &str) -> bool {
    let mut grammar = grammars.compile(&Structure::Schema(schema.clone())).expect("it can be used");
    tokenizer.encode(text).expect("it encodes").into_iter().all(|token| {
        let is_allowed = grammar.allowed().is_some_and(|allowed| allowed.contains(&token));
        grammar.take(token);
        is_allowed
    })
}

#[test]
fn a_name_is_written_in_one_way() {
    let (grammars, tokenizer, _) = grammars();
    let schemas = [
        json!({"type": "object", "properties": {"ab": {"type": "integer"}}}),
        json!({"type": "object", "properties": {"ab": false}}),
        json!({"type": "object", "properties": {"ab": false}, "additionalProperties": {"type": "integer"}}),
        json!({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}),
    ];
    for schema in &schemas {
        // A value that the listed name may not have, under all names that are that name to a reader of JSON.
        for name in ["ab", r"\u0061b", r"a\u0062", r"\u0061\u0062"] {
            for value in [r#""x""#, "true"] {
                let text = format!(r#"{{"{name}":{value}}}"#);
                assert!(!takes(&grammars, &tokenizer, schema, &text), "{text} by {schema}");
            }
        }
        assert!(takes(&grammars, &tokenizer, schema, r#"{"b\n\"\\é":1}"#), "{schema}");
    }
    let whole = json!({"type": "object", "properties": {"a\u{1}\"": {"type": "integer"}}, "required": ["a\u{1}\""],
        "additionalProperties": false});
    assert!(takes(&grammars, &tokenizer, &whole, r#"{"a\u0001\"":1}"#), "a name that the schema writes so");
}

#[test]
fn names_that_may_come_twice_are_not_counted() {
    let (grammars, ..) = grammars();
    for (schema, is_taken) in [
        (json!({"type": "object", "minProperties": 1}), true),
        (json!({"type": "object", "minProperties": 2}), false),
        (json!({"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}), false),
        (
            json!({"type": "object", "minProperties": 2, "patternProperties": {"^a": {}},
            "additionalProperties": false}),
            false,
        ),
        (json!({"type": "object", "minProperties": 2, "properties": {"a": {}}, "required": ["a"]}), true),
        (
            json!({"type": "object", "minProperties": 2, "properties": {"a": {}, "b": {}}, "required": ["a", "b"],
            "additionalProperties": false}),
            true,
        ),
    ] {
        let compiled = grammars.compile(&Structure::Schema(schema.clone()));
        assert_eq!(compiled.is_ok(), is_taken, "{schema}: {:?}", compiled.err());
    }
}

#[test]
fn limits_of_numbers_are_met_or_refused_in_our_words() {
    let (grammars, tokenizer, end) = grammars();
    let mut met = 0;
    for limit in [1e15, 9e17, 1e18, 1e19, 1e20, 1e300].into_iter().flat_map(|limit| [limit, -limit]) {
        for name in ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"] {
            let schema = json!({"type": "number", name: limit});
            let grammar = match grammars.compile(&Structure::Schema(schema.clone())) {
                Ok(grammar) => grammar,
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains(&format!("{name} is ")), "{schema}: {error}");
                    continue;
                }
            };
            let text = written(grammar, &tokenizer, end, 1, 60).unwrap_or_default();
            let Ok(value) = text.parse::<f64>() else { continue };
            let holds = if name.ends_with("inimum") { value >= limit } else { value <= limit };
            assert!(holds, "{text} by {schema}");
            met += 1;
        }
    }
    assert!(met > 8, "{met} were met");
}
