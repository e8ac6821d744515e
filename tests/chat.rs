//! The command `sieve chat`: its answers are those of `generate` and of a server, it reads only what is new, and what
//! it saves is a chat data set.
use crate::serve::{Served, dense};
use crate::tiny_run::{TinyRun, json, refused, spawned, succeed, text};
use serde_json::{Value, json};
use std::io::Write;
use std::process::Stdio;

/// A random model whose chats are their messages, one after another.
fn model() -> TinyRun {
    let tiny = dense();
    tiny.prints("export --checkpoint run --out model");
    tiny.write("model/chat_template.jinja", "{% for one in messages %}{{ one.content }} {% endfor %}");
    tiny
}

/// What the command prints after these lines of input, and its remarks.
fn talked(tiny: &TinyRun, more: &str, input: impl AsRef<[u8]>) -> [String; 2] {
    let chat = format!("chat --checkpoint model --device cpu --temperature 0 --max-new-tokens 6 {more}");
    let mut child = spawned(tiny.sieve(&chat).stdin(Stdio::piped()).stderr(Stdio::piped()));
    child.stdin.take().expect("a pipe").write_all(input.as_ref()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", text(&output));
    [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("UTF-8"))
}

#[test]
fn answers_are_those_of_generate_and_of_the_server_and_only_new_tokens_are_read() {
    let tiny = model();
    let [printed, remarks] = talked(&tiny, "-v", "t5 t9\nt11\n/reset\nt5 t9\n/save said.jsonl\n/nothing\n\n");
    let lines = printed.lines().filter(|line| !line.is_empty()).collect::<Vec<_>>();
    let [first, second, reset, again, saved] = lines[..] else { panic!("{printed}") };
    let generated = |prompt: &str| {
        let generate = "generate --checkpoint model --device cpu --json --max-new-tokens 6 --temperature 0";
        json(&succeed(tiny.sieve(generate).args(["--prompt", prompt])))["text"].as_str().expect("text").to_owned()
    };
    assert_eq!(first.trim(), generated("t5 t9 ").trim());
    assert_eq!(second.trim(), generated(&format!("t5 t9 {first} t11 ")).trim());
    assert_eq!((again, reset), (first, "the conversation begins again"));
    assert_eq!(saved, "2 messages are a line of said.jsonl now");
    let chat = json!({"messages": [
        {"role": "user", "content": "t5 t9"}, {"role": "assistant", "content": first},
    ]});
    assert_eq!(serde_json::from_str::<Value>(&tiny.read("said.jsonl")).expect("JSON"), chat);
    // The answer's last token and the new message: 2 of 9 tokens.
    assert!(remarks.contains("2 of 2 tokens before them were read"), "{remarks}");
    assert!(remarks.contains("2 of 9 tokens before them were read"), "{remarks}");
    assert!(remarks.contains("no command /nothing"), "{remarks}");
    let served = Served::new(&tiny, "model", "");
    let body = json!({"temperature": 0, "max_tokens": 6, "messages": [
        {"role": "user", "content": "t5 t9"}, {"role": "assistant", "content": first},
        {"role": "user", "content": "t11"},
    ]});
    let answer = served.send("POST", "/v1/chat/completions", "", body.to_string().as_bytes());
    let answer = serde_json::from_str::<Value>(&answer.1).expect("JSON");
    assert_eq!(answer["choices"][0]["message"]["content"].as_str().map(str::trim), Some(second.trim()));
    served.stop();
}

#[test]
fn a_line_that_is_wrong_does_not_end_the_conversation() {
    let tiny = model();
    let template = "{% for one in messages %}{% if one.content == 't8' %}{{ raise_exception('t8 is refused') }}\
                    {% endif %}{{ one.content }} {% endfor %}";
    tiny.write("model/chat_template.jinja", template);
    let lines = [
        &b"/save none.jsonl\n"[..],
        b"t5 t9\n",
        b"/save\tno/such/file\n",
        b"/save \n",
        b"/quit now\n",
        b"/reset it\n",
        b"t8\n",
        b"t\xff\n",
        b"t\0\n",
        b"t11\n",
    ];
    let [printed, remarks] = talked(&tiny, "", lines.concat());
    let [expected, _] = talked(&tiny, "", "t5 t9\nt11\n");
    assert_eq!(printed, expected, "what was wrong is taken back");
    for words in ["nothing was said yet", "saving to no/such/file", "t8 is refused", "/save lacks the file"] {
        assert!(remarks.contains(words), "{words:?} in {remarks}");
    }
    for command in ["/quit", "/reset"] {
        assert!(remarks.contains(&format!("{command} stands alone")), "{remarks}");
    }
    assert!(!remarks.contains("no command"), "{remarks}");
    assert_eq!(remarks.matches("is not UTF-8 or has a NUL").count(), 2, "{remarks}");
}

#[test]
fn a_conversation_that_fills_its_context_is_told() {
    let tiny = model();
    let [printed, remarks] = talked(&tiny, "--max-context 6", "t1 t2 t3\nt4\n/reset\nt1 \\\nt2\n");
    assert!(remarks.contains("the answer ends where the context does"), "{remarks}");
    assert!(remarks.contains("the message was not answered"), "{remarks}");
    // Not the model's context, which is longer.
    assert!(remarks.contains("do not fit into a conversation of at most 6"), "{remarks}");
    // After the reset one message of two lines is answered.
    assert!(printed.ends_with('\n') && printed.contains("begins again"), "{printed}");
    let chat = "chat --device cpu --checkpoint";
    refused(&mut tiny.sieve(&format!("{chat} run")), "has no chat template | sieve generate continues a text");
    refused(&mut tiny.sieve(&format!("{chat} model --temperature -1")), "temperature is -1 | use 0 for");
    refused(&mut tiny.sieve(&format!("{chat} model --max-context 99999")), "--max-context is 99999 | use at most");
}
