use super::*;
use serde_json::json;
use sieve_testing::refusal;
use std::fs;

/// The folder of chats that transformers rendered, with their templates.
fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/chat")
}

/// A folder with these files; its names of special tokens are `<s>` and `</s>`.
fn model(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let config = json!({"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "pad_token": null});
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).expect("writable");
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("writable");
        fs::write(path, text).expect("writable");
    }
    folder
}

fn read(folder: &Path) -> Result<Option<ChatTemplate>, CheckpointError> {
    ChatTemplate::read(folder)
}

fn rendered(template: &str, chat: &[(&str, &str)]) -> Result<String, CheckpointError> {
    let folder = model(&[("chat_template.jinja", template)]);
    let template = read(folder.path())?.expect("a template");
    template.render(&chat.iter().map(|&(role, content)| ChatMessage { role, content }).collect::<Vec<_>>())
}

#[test]
fn rendered_chats_are_those_of_transformers() {
    let rows = fs::read_to_string(golden().join("rendered.json")).expect("stored");
    let rows: Vec<serde_json::Value> = serde_json::from_str(&rows).expect("JSON");
    let (mut num_texts, mut num_refused) = (0, 0);
    for row in &rows {
        let name = row["template"].as_str().expect("a name");
        let template = fs::read_to_string(golden().join(name)).expect("stored");
        let chat = row["messages"].as_array().expect("a list");
        let of = |message: &'static str, item: &serde_json::Value| item[message].as_str().expect("text").to_owned();
        let chat: Vec<_> = chat.iter().map(|item| (of("role", item), of("content", item))).collect();
        let chat: Vec<_> = chat.iter().map(|(role, content)| (role.as_str(), content.as_str())).collect();
        match (rendered(&template, &chat), row["text"].as_str()) {
            (Ok(text), Some(expected)) => {
                assert_eq!(text, expected, "{name} {chat:?}");
                num_texts += 1;
            }
            (Err(error), None) => {
                refusal(Err::<(), _>(error), "the chat template cannot be applied | hint: change the messages");
                num_refused += 1;
            }
            (found, expected) => panic!("{name} {chat:?}: {found:?}, transformers {expected:?}"),
        }
    }
    let names: std::collections::BTreeSet<_> = rows.iter().map(|row| row["template"].as_str()).collect();
    assert!(names.len() >= 10 && num_texts > 80 && num_refused > 5, "{} {num_texts} {num_refused}", names.len());
}

#[test]
fn templates_are_found_where_transformers_finds_them() {
    let text = |files: &[(&str, &str)]| {
        let folder = model(files);
        let found = read(folder.path()).expect("readable");
        found.map(|found| found.render(&[]).expect("plain text"))
    };
    let list = json!({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]});
    let (list, one) = (list.to_string(), json!({"chat_template": "one"}).to_string());
    assert_eq!(text(&[]), None);
    assert_eq!(text(&[("tokenizer_config.json", "{\"chat_template\": null}")]), None);
    assert_eq!(text(&[("tokenizer_config.json", &one)]).as_deref(), Some("one"));
    assert_eq!(text(&[("tokenizer_config.json", &list)]).as_deref(), Some("d"));
    // A file with a template comes before the template in tokenizer_config.json.
    assert_eq!(text(&[("tokenizer_config.json", &one), ("chat_template.jinja", "file")]).as_deref(), Some("file"));
    let more = ("additional_chat_templates/rag.jinja", "rag");
    assert_eq!(text(&[("chat_template.jinja", "file"), more]).as_deref(), Some("file"));
    let folder = model(&[("tokenizer_config.json", &one), more]);
    refusal(read(folder.path()), "chat templates for rag, and none by default | hint: copy the one that is meant");
    let folder = model(&[("tokenizer_config.json", "{\"chat_template\": 7}")]);
    refusal(read(folder.path()), "tokenizer_config.json: chat_template is neither");
}

#[test]
fn a_template_that_is_no_jinja_or_never_ends_is_refused() {
    let chat = [("user", "hi")];
    let words = "the chat template cannot be applied: | hint:";
    refusal(rendered("{% if %}", &chat), words);
    refusal(rendered("{{ messages[0].content.nothing() }}", &chat), words);
    refusal(rendered("{{ strftime_now('%Q') }}", &chat), "is no format of a time");
    let endless = "{% macro f(n) %}{% for i in range(9999) %}{{ f(n) }}{% endfor %}{% endmacro %}{{ f(1) }}";
    refusal(rendered(endless, &chat), words);
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}";
    refusal(rendered(endless, &chat), words);
}

#[test]
fn templates_can_read_the_clock_and_special_tokens() {
    let chat = [("user", "hi")];
    let year = chrono::Local::now().format("%Y").to_string();
    let text = rendered("{{ bos_token }}{{ strftime_now('%Y') }}{{ eos_token }}{{ pad_token }}", &chat);
    assert_eq!(text.expect("a text"), format!("<s>{year}</s>"));
}
