//! Compares which tokens of chats are predicted with what transformers says.
use super::*;
use serde_json::{Value, json};
use sieve_data::Tokenizer;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

/// A chat, and the tokens that transformers makes of it.
struct Row {
    template: String,
    tokenizer: String,
    /// The messages, and what is beside them.
    chat: Value,
    /// Tokens, and whether each is the assistant's; `None` where the template refuses the chat.
    expected: Option<(Vec<u32>, Vec<bool>)>,
}

fn stored(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(golden().join(name)).expect("stored");
    serde_json::from_str(&text).expect("JSON")
}

/// The stored chats of a folder: each row has its messages, or the number of one in `chats`.
fn rows(folder: &str, chats: &[Value]) -> Vec<Row> {
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let numbers = |value: &Value| {
        let list = value.as_array().expect("a list");
        list.iter().map(|number| number.as_u64().expect("a number") as u32).collect::<Vec<_>>()
    };
    let row = |row: &Value| Row {
        template: text(&row["template"]),
        tokenizer: text(&row["tokenizer"]),
        chat: match row["row"].as_u64() {
            Some(number) => chats[number as usize].clone(),
            None => json!({"messages": row["messages"]}),
        },
        expected: (!row["tokens"].is_null()).then(|| {
            (numbers(&row["tokens"]), numbers(&row["mask"]).iter().map(|&is_answer| is_answer == 1).collect())
        }),
    };
    stored(&format!("{folder}/masks.json")).iter().map(row).collect()
}

/// A template that says of no word whose it is.
fn without_blocks() -> Template {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let turn = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}";
    let begin = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    fs::write(file.path(), format!("{{% for m in messages %}}{turn}{{% endfor %}}{begin}")).expect("writable");
    template(file.path())
}

/// What the data reads of a row: of what is beside the messages, the columns that the template asks for.
fn text(template: &Template, row: &Value) -> Result<ChatText, ChatError> {
    let columns = template.columns();
    let mut row = row.as_object().expect("an object").clone();
    row.retain(|name, _| name == "messages" || columns.contains(name));
    template.text(&Value::Object(row).to_string())
}

/// The template of this file with the special tokens that transformers was given.
fn template(file: &Path) -> Template {
    let folder = tempfile::tempdir().expect("a folder");
    let config = serde_json::json!({"bos_token": "<s>", "eos_token": "</s>"});
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).expect("writable");
    fs::copy(file, folder.path().join("chat_template.jinja")).expect("stored");
    Template(ChatTemplate::beside(&folder.path().join("tokenizer.json")).expect("readable").expect("a template"))
}

/// Tokens of a chat, and whether each is predicted.
fn masked(template: &Template, tokenizer: &Tokenizer, chat: &Value) -> Result<(Vec<u32>, Vec<bool>), String> {
    let found = text(template, chat).map_err(|error| error.what)?;
    let parts = tokenizer.encode_parts(&found.text, &found.answers).expect("tokens");
    assert!(parts.len().is_multiple_of(2));
    let mask = parts.iter().enumerate().flat_map(|(at, part)| part.iter().map(move |_| at % 2 == 1));
    Ok((parts.concat(), mask.collect()))
}

#[test]
fn tokens_of_answers_are_those_of_transformers() {
    let (mut num_equal, mut num_refused, mut names) = (0, 0, BTreeSet::new());
    for row in rows("chat_masks", &[]) {
        let template = template(&golden().join("chat_masks").join(&row.template));
        assert!(template.marks_answers());
        let tokenizer = Tokenizer::from_file(&golden().join("chat_masks").join(&row.tokenizer)).expect("a tokenizer");
        let found = masked(&template, &tokenizer, &row.chat);
        let place = format!("{} {} {:?}", row.template, row.tokenizer, row.chat);
        match (found, row.expected) {
            (Ok(found), Some(expected)) => {
                assert_eq!(found, expected, "{place}");
                num_equal += 1;
            }
            (Err(what), None) => {
                assert!(what.contains("the chat template cannot be applied"), "{place}: {what}");
                num_refused += 1;
            }
            // A chat whose only answer is empty teaches nothing, and transformers masks it whole.
            (Err(what), Some((_, mask))) if !mask.contains(&true) => {
                assert!(what.contains("writes no word of the assistant's"), "{place}: {what}");
            }
            (found, expected) => panic!("{place}: {found:?}, transformers {expected:?}"),
        }
        names.insert((row.template, row.tokenizer));
    }
    assert!(names.len() >= 12 && num_equal > 100 && num_refused > 5, "{} {num_equal} {num_refused}", names.len());
}

/// Without `{% generation %}` blocks the same answers are found, in templates that end each message by a token, as
/// published ones do.
#[test]
fn answers_without_blocks_are_those_of_the_blocks() {
    let mut num_equal = 0;
    // Not Zephyr's: the beginning of an answer ends with a line break there, which the block counts as the answer's.
    let same = ["chatml.jinja", "llama2.jinja", "llama3.jinja"];
    for row in rows("chat_masks", &[]).iter().filter(|row| same.contains(&row.template.as_str())) {
        // An answer at the beginning follows an empty chat, which Llama 3's template cannot write.
        let is_first = row.chat["messages"][0]["role"] == "assistant" && row.template == "llama3.jinja";
        let Some(expected) = row.expected.as_ref().filter(|(_, mask)| mask.contains(&true) && !is_first) else {
            continue;
        };
        let text = fs::read_to_string(golden().join("chat_masks").join(&row.template)).expect("stored");
        let file = tempfile::NamedTempFile::new().expect("a file");
        let text = text.replace("% generation ", "% if true ").replace("% endgeneration ", "% endif ");
        let text = text.replace("- generation ", "- if true ").replace("- endgeneration ", "- endif ");
        fs::write(file.path(), text).expect("writable");
        let plain = template(file.path());
        assert!(!plain.marks_answers());
        let tokenizer = Tokenizer::from_file(&golden().join("chat_masks").join(&row.tokenizer)).expect("a tokenizer");
        let found = masked(&plain, &tokenizer, &row.chat);
        assert_eq!(found.as_ref(), Ok(expected), "{} {:?}", row.template, row.chat);
        num_equal += 1;
    }
    assert!(num_equal >= 50, "{num_equal}");
}

/// Rows with more keys than role and content, tools and documents, weights, and templates that use what Jinja has: each
/// row has the tokens and labels of transformers, or is refused with a sentence.
#[test]
fn rows_of_all_kinds_are_those_of_transformers_or_refused() {
    let chats = stored("chat_rows/rows.json");
    let tokenizer = Tokenizer::from_file(&golden().join("chat_masks/tokenizer.json")).expect("a tokenizer");
    let (mut num_equal, mut refused, mut names, mut wrong) = (0, Vec::new(), BTreeSet::new(), Vec::new());
    for row in rows("chat_rows", &chats) {
        let place = format!("{} {}", row.template, row.chat);
        let template = template(&golden().join("chat_rows").join(&row.template));
        assert!(template.marks_answers(), "{place}");
        match (masked(&template, &tokenizer, &row.chat), row.expected) {
            (Ok(found), Some(expected)) if found == expected => num_equal += 1,
            (Ok(found), expected) => wrong.push(format!("{place}: {found:?}, transformers {expected:?}")),
            (Err(what), expected) => refused.push((what, expected.is_some(), place)),
        }
        names.insert(row.template);
    }
    assert!(wrong.is_empty(), "{} are wrong: {}", wrong.len(), wrong.join("\n"));
    // What transformers renders is refused for these reasons alone.
    let reasons = [
        "which the chat template does not print",
        "\"content\" that is not a string",
        "writes no word of the assistant's",
    ];
    for (what, is_rendered, place) in &refused {
        let is_known = reasons.iter().any(|reason| what.contains(reason));
        assert!(!is_rendered || is_known, "{place}: {what}");
    }
    let num_rendered = refused.iter().filter(|(_, is_rendered, _)| *is_rendered).count();
    assert!(names.len() >= 20 && num_equal >= 450, "{} templates, {num_equal} equal", names.len());
    assert!(num_rendered <= 190, "{num_rendered} of transformers' are refused");
}

#[test]
fn answers_without_a_weight_have_no_label() {
    let plain = without_blocks();
    let blocks = template(&golden().join("chat_rows/quoted.jinja"));
    let chat = |key: &str, value: Value| {
        let mut bad = json!({"role": "assistant", "content": "bad"});
        bad[key] = value;
        let ask = json!({"role": "user", "content": "Go"});
        json!({"messages": [ask, bad, ask, {"role": "assistant", "content": "good"}]})
    };
    let labels = |template: &Template, row: &Value| {
        let found = text(template, row)?;
        Ok::<_, ChatError>(found.answers.iter().map(|answer| found.text[answer.clone()].to_owned()).collect::<Vec<_>>())
    };
    for template in [&plain, &blocks] {
        for (key, value) in
            [("weight", json!(0)), ("weight", json!(0.0)), ("train", json!(false)), ("trainable", json!(false))]
        {
            let found = labels(template, &chat(key, value.clone())).expect("a chat");
            assert_eq!(found, ["good<|im_end|>"], "{key} {value}");
        }
        for value in [json!(1), json!(1.0), json!(null)] {
            assert_eq!(labels(template, &chat("weight", value)).expect("a chat").len(), 2);
        }
        for value in [json!(0.5), json!(2), json!("0"), json!([0])] {
            let error = labels(template, &chat("weight", value)).expect_err("no weight");
            assert!(error.what.contains("message 2 has a \"weight\" that is neither 0 nor 1"), "{}", error.what);
        }
    }
    let only =
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]});
    let error = labels(&plain, &only).expect_err("nothing to learn");
    assert!(error.what.contains("none of its 2 messages is the assistant's with a weight"), "{}", error.what);
    let users =
        json!({"messages": [{"role": "user", "content": "a", "train": true}, {"role": "assistant", "content": "b"}]});
    let error = labels(&plain, &users).expect_err("a user's message");
    assert!(error.what.contains("message 1 has a \"train\", and it is the user's"), "{}", error.what);
}

#[test]
fn rows_that_are_no_chat_are_refused_with_the_reason() {
    let template = without_blocks();
    for (messages, words) in [
        (json!("text"), "not a list of messages"),
        (json!([]), "none of its 0 messages is the assistant's"),
        (json!([{"role": "user", "content": "a"}]), "none of its 1 messages"),
        (json!([7]), "message 1 is not an object"),
        (json!([{"role": "user", "content": "a"}, {"content": "b"}]), "message 2 has no \"role\""),
        (json!([{"role": 1, "content": "a"}]), "message 1 has a \"role\" that is not a string"),
        (json!([{"role": "bot", "content": "a"}]), "message 1 has the role \"bot\""),
        (json!([{"role": "assistant"}]), "message 1 has no \"content\" (assistant)"),
        (json!([{"role": "assistant", "content": null}]), "message 1 has no \"content\" (assistant)"),
        (json!([{"role": "assistant", "content": ["a"]}]), "\"content\" whose part 1 is no text"),
        (json!([{"role": "assistant", "content": 7}]), "\"content\" that is not a string"),
        (json!([{"role": "assistant", "content": "a\0"}]), "NUL at byte 1"),
        (json!([{"role": "assistant", "content": "", "tool_calls": [{}]}]), "\"tool_calls\", which the chat template"),
        (json!([{"role": "assistant", "content": "a", "mood": 7}]), "\"mood\", which the chat template does not print"),
    ] {
        let error = text(&template, &json!({"messages": messages})).expect_err("refused");
        assert!(error.what.contains(words), "{messages}: {}", error.what);
        assert!(!error.hint.is_empty() && !error.is_of_template);
    }
    let error = text(&template, &json!({"messages": [{"from": "human", "value": "a"}]})).expect_err("refused");
    assert!(error.what.contains("no \"role\"") && error.hint.contains("rename \"from\""), "{error:?}");
    let silent = json!([{"role": "user", "content": "a", "id": 3, "name": null},
        {"role": "assistant", "content": "b", "tool_calls": [], "reasoning_content": ""}]);
    let plain = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let found = [silent, plain].map(|messages| text(&template, &json!({"messages": messages})).expect("a chat"));
    assert_eq!(found[0], found[1]);
}

#[test]
fn a_template_that_rewrites_a_chats_beginning_is_refused() {
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let short = [turn("user", "a"), turn("assistant", "<think>\nb\n</think>\n\nc")];
    let long = [&short[..], &[turn("user", "d"), turn("assistant", "e")]].concat();
    // It drops the thoughts of answers before the last question.
    let found = text(&template(&golden().join("chat/last_question.jinja")), &json!({"messages": long}));
    let what = found.expect_err("no prefix").what;
    assert!(what.contains("the chat up to message 2 is not how the whole chat begins"), "{what}");
    assert!(what.contains("{% generation %}"), "{what}");
    // It begins an answer with a thought.
    let found = text(&template(&golden().join("chat/reasoning.jinja")), &json!({"messages": short}));
    let what = found.expect_err("no prefix").what;
    assert!(what.contains("the chat before message 2 is not how the whole chat begins"), "{what}");
}
