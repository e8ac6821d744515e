//! Chats that `sieve serve` answers, and those that it refuses.
use crate::serve::{Served, events};
use crate::tiny_run::TinyRun;
use crate::words_model;
use serde_json::{Value, json};

#[test]
fn a_chat_is_answered_by_the_models_template() {
    let tiny = TinyRun::new("kind = \"mha\"");
    words_model::write(&tiny);
    let served = Served::new(&tiny, "metaspace", "");
    let path = "/v1/chat/completions";
    let body = |content: Value, stream: bool| {
        json!({"messages": [{"role": "system", "content": "Be short"}, {"role": "user", "content": content}],
            "max_completion_tokens": 5, "temperature": 0, "logprobs": true, "top_logprobs": 2, "stream": stream})
    };
    let whole = served.post(path, &body(json!("What?"), false)).json();
    let choice = &whole["choices"][0];
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!(" Paris"), &json!("stop")),
        "{whole}"
    );
    // The end token is counted and has a log-probability.
    let tokens = choice["logprobs"]["content"].as_array().expect("a list").len() as u64;
    assert_eq!(whole["usage"]["completion_tokens"], tokens);
    let top = |choice: &Value| choice["logprobs"]["content"][0]["top_logprobs"].as_array().expect("a list").len();
    assert_eq!(top(choice), 2);
    for unasked in [json!(0), Value::Null] {
        let mut body = body(json!("What?"), false);
        body["top_logprobs"] = unasked;
        assert_eq!(top(&served.post(path, &body).json()["choices"][0]), 0);
    }
    let parts = json!([{"type": "text", "text": "What?"}]);
    let chunks = events(&served.post(path, &body(parts, true)));
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let said = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    assert_eq!(said.collect::<String>(), " Paris");
    let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
    // What a template could print of a message, and this server would drop, is refused with its place.
    let answered = json!({"role": "assistant", "content": "Paris", "refusal": null, "tool_calls": [], "name": null});
    for (message, words) in [
        (
            json!({"role": "user", "content": image}),
            r#"messages[1].content: the message has a \"content\" whose part 1 is no text (its type is \"image_url\""#,
        ),
        (
            json!({"role": "User", "content": "x"}),
            r#"messages[1].role: the message has the role \"User\"; roles are system"#,
        ),
        (json!({"content": "x"}), "messages[1].role: the message has no"),
        (json!("x"), "messages[1]: the message is not an object"),
        (json!({"role": "assistant", "content": null, "tool_calls": [{}]}), "messages[1].tool_calls: the message has"),
        (
            json!({"role": "assistant", "content": "x", "reasoning_content": "y"}),
            "messages[1].reasoning_content: the message has",
        ),
        (json!({"role": "user", "content": "x", "name": "y"}), "messages[1].name: the message has"),
        (
            json!({"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}),
            "which the chat template does not print",
        ),
    ] {
        let answer = served.post(path, &json!({"messages": [answered, message]}));
        assert_eq!(answer.0, 400, "{words}: {}", answer.1);
        assert!(answer.1.contains(words), "{words}: {}", answer.1);
    }
    for name in ["max_tokens", "max_completion_tokens"] {
        let answer = served.post(path, &json!({"messages": [answered], name: 900_000}));
        assert!(answer.1.contains(&format!("shorten messages or lower {name}")), "{}", answer.1);
        assert_eq!(answer.json()["error"]["param"], "messages");
    }
    let unchanged = json!({"messages": [answered], "modalities": ["text"], "function_call": "none",
        "prompt_cache_key": "x", "safety_identifier": "x", "max_tokens": 1});
    assert_eq!(served.post(path, &unchanged).0, 200);
    served.stop();
}
