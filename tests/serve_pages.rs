//! The page of `sieve serve`, which other pages may use it, under which names it answers, what it logs, and what
//! changes logits.
use crate::serve::{Served, dense};
use serde_json::{Value, json};

#[test]
fn a_page_that_was_not_asked_in_is_refused() {
    let tiny = dense();
    let served = Served::new(&tiny, "run", "--api-key secret");
    let (path, key) = ("/v1/completions", "Authorization: Bearer secret\r\n");
    let body = br#"{"prompt": "t1", "max_tokens": 1}"#;
    // What a page of the web can send without asking, and under a name that it bound to this machine.
    let local = "Host: 127.0.0.1:8000\r\n";
    for (head, kind, status, words) in [
        (format!("{local}{key}"), "text/plain", 415, "curl: -H 'Content-Type: application/json'"),
        (format!("{local}{key}Origin: https://evil.example\r\n"), "application/json", 403, "--allow-origin"),
        (format!("Host: evil.example:8000\r\n{key}"), "application/json", 403, "--allow-host evil.example:8000"),
        (format!("{local}{key}Origin: http://127.0.0.1:8000\r\n"), "application/json", 200, "choices"),
    ] {
        let answer = served.send_bare(&format!("POST {path} HTTP/1.1\r\n{head}Content-Type: {kind}\r\n"), body);
        assert!(answer.0 == status && answer.1.contains(words), "{head} {}: {}", answer.0, answer.1);
        assert!(!answer.2.contains("access-control"), "{head} {}", answer.2);
    }
    served.stop();
}

#[test]
fn pages_of_a_named_origin_ask_first_and_read() {
    let tiny = dense();
    let origin = "https://chat.example";
    let served = Served::new(&tiny, "run", &format!("--api-key secret --allow-origin {origin} --allow-host sieve.lan"));
    let (path, page) = ("/v1/completions", format!("Origin: {origin}\r\n"));
    let asks = served.send_bare(&format!("OPTIONS {path} HTTP/1.1\r\nHost: sieve.lan\r\n{page}"), b"");
    assert_eq!(asks.0, 204, "{}", asks.1);
    for header in [
        "access-control-allow-origin: https://chat.example",
        "access-control-allow-headers: authorization, content-type",
        "vary: origin",
    ] {
        assert!(asks.2.contains(header), "{header}: {}", asks.2);
    }
    let body = br#"{"prompt": "t1", "max_tokens": 1}"#;
    // A refusal is read too: the page must know that its key is wrong.
    for (key, status) in [("Authorization: Bearer secret\r\n", 200), ("", 401)] {
        let answer = served.send("POST", path, &format!("{page}{key}"), body);
        assert_eq!(answer.0, status, "{}", answer.1);
        assert!(answer.2.contains("access-control-allow-origin: https://chat.example"), "{}", answer.2);
    }
    served.stop();
    for wrong in ["chat.example", "*", "https://", "https://chat.example/page"] {
        let serve = format!("serve --checkpoint run --device cpu --port 0 --allow-origin {wrong}");
        tiny.refuses(&serve, "an origin is http:// or https://");
    }
    for wrong in ["http://sieve.lan", "sieve.lan/v1", "*"] {
        let serve = format!("serve --checkpoint run --device cpu --port 0 --allow-host {wrong}");
        tiny.refuses(&serve, "a host name has no scheme and no path");
    }
    let open = "serve --checkpoint run --device cpu --port 0 --host 0.0.0.0 --allow-host sieve.lan";
    tiny.refuses(open, "answers to every name | leave --allow-host out");
}

#[test]
fn the_page_is_open_and_may_do_no_more_than_ask_its_server() {
    let tiny = dense();
    let served = Served::new(&tiny, "run", "--api-key secret");
    let page = served.send("GET", "/", "", b"");
    assert_eq!(page.0, 200, "{}", page.1);
    assert!(page.1.starts_with("<!doctype html>") && page.1.trim_end().ends_with("</html>"), "{}", page.1);
    let head = served.send("HEAD", "/", "", b"");
    assert_eq!((head.0, head.1.as_str()), (200, ""));
    for header in [
        "content-type: text/html; charset=utf-8",
        "content-security-policy: default-src 'none'; connect-src 'self';",
        "x-content-type-options: nosniff",
        "referrer-policy: no-referrer",
    ] {
        assert!(page.2.contains(header) && head.2.contains(header), "{header}: {}", page.2);
    }
    let foreign = served.send_bare("GET / HTTP/1.1\r\nHost: evil.example\r\n", b"");
    assert_eq!(foreign.0, 403, "{}", foreign.1);
    assert_eq!(served.send("GET", "/v1/models", "", b"").0, 401);
    served.stop();
}

#[test]
fn an_answer_says_how_many_keys_its_last_token_reads() {
    let tiny = dense();
    let served = Served::new(&tiny, "run", "");
    let body = br#"{"prompt": ["t1 t2", "t1 t2 t3"], "max_tokens": 1, "temperature": 0}"#;
    let answer = served.send("POST", "/v1/completions", "", body);
    assert_eq!(answer.0, 200, "{}", answer.1);
    // Those of the longer prompt: the new token is drawn, and not read.
    assert!(answer.1.contains(r#""keys":{"all":3,"read":3.0}"#), "{}", answer.1);
    let models = served.send("GET", "/v1/models", "", b"");
    assert!(models.1.contains(r#""keys":{"all":64,"read":64.0}"#), "{}", models.1);
    served.stop();
}

#[test]
fn each_request_has_a_line_that_holds_no_text() {
    let tiny = dense();
    let served = Served::new(&tiny, "run", "--log-requests");
    let path = "/v1/completions";
    let ask = |more: Value| {
        let mut body = json!({"prompt": "t5 t9 t11", "max_tokens": 4, "temperature": 0});
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        served.send("POST", path, "", body.to_string().as_bytes()).0
    };
    let statuses = [json!({}), json!({"stream": true, "n": 2}), json!({"top_p": 7})].map(ask);
    assert_eq!(statuses, [200, 200, 400]);
    assert_eq!(served.send("GET", "/secret-path", "", b"").0, 404);
    assert_eq!(served.send("GET", "/health", "", b"").0, 200);
    let printed = served.stop();
    assert!(!printed.contains("t5") && !printed.contains("secret"), "{printed}");
    let lines = printed.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).collect::<Vec<_>>();
    let told = |at: usize| {
        let line = &lines[at];
        let tokens = ["prompt_tokens", "new_tokens"].map(|name| line[name].as_u64().expect("a number"));
        (line["method"].clone(), line["path"].clone(), line["status"].clone(), tokens)
    };
    assert_eq!(lines.len(), 4, "{printed}");
    assert_eq!(told(0), (json!("POST"), json!(path), json!(200), [3, 4]));
    assert_eq!(told(1), (json!("POST"), json!(path), json!(200), [3, 8]));
    assert_eq!(told(2), (json!("POST"), json!(path), json!(400), [0, 0]));
    assert_eq!(told(3), (json!("GET"), json!("other"), json!(404), [0, 0]));
    for line in &lines[..2] {
        let [first, all] = ["first_seconds", "seconds"].map(|name| line[name].as_f64().expect("seconds"));
        assert!(first > 0.0 && first <= all && line["problem"].is_null(), "{line}");
    }
    assert!(lines[2]["first_seconds"].is_null(), "{}", lines[2]);
}

#[test]
fn penalties_and_min_p_change_what_is_drawn_and_nothing_of_other_texts() {
    let tiny = dense();
    let served = Served::new(&tiny, "run", "");
    let text = |more: Value| {
        let mut body = json!({"prompt": "t5 t9 t11", "max_tokens": 12, "temperature": 0, "seed": 3});
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        let answer = served.send("POST", "/v1/completions", "", body.to_string().as_bytes());
        assert_eq!(answer.0, 200, "{}", answer.1);
        serde_json::from_str::<Value>(&answer.1).expect("JSON")["choices"][0]["text"].as_str().expect("text").to_owned()
    };
    let greedy = text(json!({}));
    // A token that was there has no chance beside any other one whose logit is positive.
    let fresh = text(json!({"repetition_penalty": 1e6}));
    let mut words = "t5 t9 t11".split(' ').chain(fresh.split_whitespace()).collect::<Vec<_>>();
    let all = words.len();
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), all, "{fresh}");
    // Of tokens as likely as the likeliest there is one.
    assert_eq!(text(json!({"temperature": 2, "min_p": 1})), greedy);
    let drawn = text(json!({"temperature": 2}));
    assert_ne!(drawn, greedy);
    // A text beside one with penalties goes on as by itself.
    let beside = std::thread::scope(|scope| {
        let penalised = scope.spawn(|| text(json!({"presence_penalty": 2, "frequency_penalty": 2})));
        let drawn = scope.spawn(|| text(json!({"temperature": 2})));
        (penalised.join().expect("an answer"), drawn.join().expect("an answer"))
    });
    assert_eq!(beside.1, drawn);
    served.stop();
}
