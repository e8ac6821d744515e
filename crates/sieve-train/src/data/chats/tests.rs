//! Compares which tokens of chats are predicted with what transformers says.
use super::*;
use serde_json::Value;
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
    chat: Vec<ChatTurn>,
    /// Tokens, and whether each is the assistant's; `None` where the template refuses the chat.
    expected: Option<(Vec<u32>, Vec<bool>)>,
}

/// The stored chats.
fn rows() -> Vec<Row> {
    let text = fs::read_to_string(golden().join("chat_masks/masks.json")).expect("stored");
    let rows: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let numbers = |value: &Value| {
        let list = value.as_array().expect("a list");
        list.iter().map(|number| number.as_u64().expect("a number") as u32).collect::<Vec<_>>()
    };
    let row = |row: &Value| Row {
        template: text(&row["template"]),
        tokenizer: text(&row["tokenizer"]),
        chat: (row["messages"].as_array().expect("a list").iter())
            .map(|turn| ChatTurn { role: text(&turn["role"]), content: text(&turn["content"]) })
            .collect(),
        expected: (!row["tokens"].is_null()).then(|| {
            (numbers(&row["tokens"]), numbers(&row["mask"]).iter().map(|&is_answer| is_answer == 1).collect())
        }),
    };
    rows.iter().map(row).collect()
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
fn masked(template: &Template, tokenizer: &Tokenizer, chat: &[ChatTurn]) -> Result<(Vec<u32>, Vec<bool>), String> {
    let found = template.text(chat)?;
    let parts = tokenizer.encode_parts(&found.text, &found.answers).expect("tokens");
    assert!(parts.len().is_multiple_of(2));
    let mask = parts.iter().enumerate().flat_map(|(at, part)| part.iter().map(move |_| at % 2 == 1));
    Ok((parts.concat(), mask.collect()))
}

#[test]
fn tokens_of_answers_are_those_of_transformers() {
    let (mut num_equal, mut num_refused, mut names) = (0, 0, BTreeSet::new());
    for row in rows() {
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
    for row in rows().iter().filter(|row| same.contains(&row.template.as_str())) {
        // An answer at the beginning follows an empty chat, which Llama 3's template cannot write.
        let is_first = row.chat[0].is_answer() && row.template == "llama3.jinja";
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

#[test]
fn a_template_that_rewrites_a_chats_beginning_is_refused() {
    let turn = |role: &str, content: &str| ChatTurn { role: role.to_owned(), content: content.to_owned() };
    let short = [turn("user", "a"), turn("assistant", "<think>\nb\n</think>\n\nc")];
    let long = [&short[..], &[turn("user", "d"), turn("assistant", "e")]].concat();
    // It drops the thoughts of answers before the last question.
    let text = template(&golden().join("chat/last_question.jinja")).text(&long);
    let what = text.expect_err("no prefix");
    assert!(what.contains("the chat up to message 2 is not how the whole chat begins"), "{what}");
    assert!(what.contains("{% generation %}"), "{what}");
    // It begins an answer with a thought.
    let what = template(&golden().join("chat/reasoning.jinja")).text(&short).expect_err("no prefix");
    assert!(what.contains("the chat before message 2 is not how the whole chat begins"), "{what}");
    let mark = [turn("user", "\u{FDD0}"), turn("assistant", "b")];
    let what = template(&golden().join("chat/chatml.jinja")).text(&mark).expect_err("a mark");
    assert!(what.contains("U+FDD0"), "{what}");
}
