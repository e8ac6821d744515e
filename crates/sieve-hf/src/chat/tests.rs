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
    refusal(rendered("{{ strftime_now('%Q') }}", &chat), "is not a time format");
    let endless = "{% macro f(n) %}{% for i in range(9999) %}{{ f(n) }}{% endfor %}{% endmacro %}{{ f(1) }}";
    refusal(rendered(endless, &chat), words);
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}";
    refusal(rendered(endless, &chat), words);
}

#[test]
fn numbers_are_those_of_python() {
    let chat = [("user", "hi")];
    let printed = |template: &str| rendered(template, &chat).expect("a template");
    // As CPython 3 prints them.
    assert_eq!(printed("{{ 1 // 0.1 }} {{ -7.5 // 2 }} {{ 7 // -2.0 }} {{ 2 ** -1 }}"), "9.0 -4.0 -4.0 0.5");
    let formats = "{{ '%#06x|%#x|%+#x|%#.4x|%-#8X|%#o' % (255, -255, 255, 255, 255, 8) }}";
    assert_eq!(printed(formats), "0x00ff|-0xff|+0xff|0x00ff|0XFF    |0o10");
    for (template, words) in [
        ("{{ 0 ** -1 }}", "0 is raised to a negative power"),
        ("{{ 0.0 ** -1.5 }}", "0 is raised to a negative power"),
        ("{{ -8.0 ** 0.5 }}{{ (0 - 8.0) ** 0.5 }}", "a negative number is raised to a fraction"),
        ("{{ 10.0 ** 400 }}", "a power is too large"),
    ] {
        refusal(rendered(template, &chat), words);
    }
}

/// Templates that would take all stack, memory or time, made of the parts in `hostile.json`.
fn hostile() -> Vec<String> {
    let stored = fs::read_to_string(golden().join("hostile.json")).expect("stored");
    let stored: serde_json::Value = serde_json::from_str(&stored).expect("JSON");
    let parts = |kind: &str| {
        let parts =
            stored[kind].as_array().expect("a list").iter().map(|part| part.as_str().expect("a text").to_owned());
        parts.collect::<Vec<_>>()
    };
    let loops = |start: &str, body: &str| format!("{start}{{% for i in range(99999) %}}{body}{{% endfor %}}");
    let mut templates = parts("whole");
    for part in parts("nested") {
        let grown = loops("{% set ns = namespace(s=[1]) %}", &format!("{{% set ns.s = {part} %}}"));
        let ends = ["x", "{{ ns.s }}", "{{ ns.s == ns.s }}", "{{ ns.s | tojson }}"];
        templates.extend(ends.map(|end| format!("{grown}{end}")));
    }
    templates.extend(parts("before").iter().map(|part| format!("{{{{ {}1 }}}}", part.repeat(30_000))));
    templates.extend(parts("behind").iter().map(|part| format!("{{{{ a{} }}}}", part.repeat(15_000))));
    templates.extend(parts("blocks").iter().map(|part| part.repeat(8_000)));
    let doubled = |part: &String| format!("{{% set s = 'aaaaaaaa' %}}{}{{{{ s | length }}}}", part.repeat(60));
    templates.extend(parts("doubled").iter().map(doubled));
    templates.extend(parts("repeated").iter().map(|part| loops("{% set s = range(99999) | list %}", part)));
    templates.extend(parts("single").iter().map(|part| format!("{{{{ {part} }}}}")));
    templates.push("a".repeat(300 << 10));
    templates
}

/// A stranger's template ends with a text or a sentence, and with neither the process nor a reader of a server.
#[test]
fn a_hostile_template_ends_with_a_text_or_a_sentence() {
    let mut num_refused = 0;
    for template in hostile() {
        let start = std::time::Instant::now();
        let found = rendered(&template, &[("user", "hi")]);
        let shown: String = template.chars().take(90).collect();
        let took = start.elapsed();
        assert!(took.as_secs() < 25, "{shown}: {took:?}");
        match found {
            // What has an end may come to it, but not with a text that no chat has.
            Ok(text) => assert!(text.len() < 1 << 20, "{shown}: {} bytes", text.len()),
            Err(error) => {
                refusal(Err::<(), _>(error), "the chat template cannot be applied: | hint: ");
                num_refused += 1;
            }
        }
    }
    assert!(num_refused > 90, "{num_refused} are refused");
    // What is deep or holds itself, and has an end.
    for (template, expected) in [
        ("{% set ns = namespace() %}{% set ns.s = ns %}{{ ns.s == ns }}", "True"),
        ("{% for a in [[1]] %}{% set x = loop.changed(loop) %}{{ x }}{% endfor %}", "True"),
        (&format!("{{{{ {}1 }}}}", "1 + ".repeat(200)), "201"),
        (&format!("{{{{ {}1{} }}}}", "(".repeat(100), ")".repeat(100)), "1"),
    ] {
        assert_eq!(rendered(template, &[]).expect("a text"), expected, "{template}");
    }
}

#[test]
fn variables_end_with_their_block_and_values_are_pythons() {
    for (template, expected) in [
        ("{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}", "ba"),
        ("{% set x = 'a' %}{% filter upper %}{% set x = 'b' %}{{ x }}{% endfilter %}{{ x }}", "Ba"),
        ("{% set x = 'a' %}{% set y %}{% set x = 'b' %}{{ x }}{% endset %}{{ x }}{{ y }}", "ab"),
        ("{% set ns = namespace(a=[]) %}{% set ns.a = ns.a + ['b'] %}{{ ns.a }}", "['b']"),
        ("{{ (1, 'a') }}{{ (1,) }}{{ () }}", "(1, 'a')(1,)()"),
        ("{{ 2.5 | round }} {{ 0.5 | round }} {{ 2.675 | round(2) }} {{ 7 | round }}", "2.0 0.0 2.67 7"),
        (
            "{{ 1e20 }} {{ 1e-7 }} {{ 1e15 }} {{ 1e16 }} {{ 0.1 + 0.2 }}",
            "1e+20 1e-07 1000000000000000.0 1e+16 0.30000000000000004",
        ),
        ("{{ {'b': 1, 'a': (2, none)} }}", "{'b': 1, 'a': (2, None)}"),
        ("{{ '{% generation %}' }}", "{% generation %}"),
        ("{{ {'a': 1}.items() }}", "dict_items([('a', 1)])"),
    ] {
        assert_eq!(rendered(template, &[]).expect("a text"), expected, "{template}");
    }
}

#[test]
fn templates_can_read_the_clock_and_special_tokens() {
    let chat = [("user", "hi")];
    let year = chrono::Local::now().format("%Y").to_string();
    let text = rendered("{{ bos_token }}{{ strftime_now('%Y') }}{{ eos_token }}{{ pad_token }}", &chat);
    assert_eq!(text.expect("a text"), format!("<s>{year}</s>"));
}
