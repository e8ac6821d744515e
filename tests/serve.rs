//! The command `sieve serve`: its texts and likelihoods are those of `generate` and `eval tasks`, its refusals are
//! OpenAI's, and neither clients nor requests end it.
use crate::random_model::{kinds, random_model, recipe, write_checkpoint};
use crate::tasks_cli::DENSE;
use crate::tiny_run::{TinyRun, ended, json, signal, spawned, succeed, text, wait_until};
use crate::words_model;
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

/// A running server and the first line that it read from its output.
pub(crate) struct Served {
    /// `None` once it was asked to stop.
    child: Option<Child>,
    /// `127.0.0.1:PORT`.
    address: String,
}

/// The type of a body.
pub(crate) const JSON: &str = "Content-Type: application/json\r\n";

/// An answer: its status, its body, and its head in lower case.
pub(crate) struct Answer(pub(crate) u16, pub(crate) String, pub(crate) String);

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.1).unwrap_or_else(|e| panic!("{e}: {}", self.1))
    }
}

impl Served {
    pub(crate) fn new(tiny: &TinyRun, checkpoint: &str, more: &str) -> Self {
        let serve = format!("serve --checkpoint {checkpoint} --name tiny --device cpu --port 0 {more}");
        let mut child = spawned(&mut tiny.sieve(&serve));
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut printed = String::new();
        while !printed.contains("/v1:") {
            if output.read_line(&mut printed).expect("text") == 0 {
                let output = child.wait_with_output().expect("it ends");
                panic!("{printed}{}", text(&output));
            }
        }
        // The rest of the output is short and fits into the pipe.
        child.stdout = Some(output.into_inner());
        let address = printed.split("http://").nth(1).and_then(|rest| rest.split("/v1").next());
        let address = address.expect("an address").to_owned();
        Self { child: Some(child), address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(240))).expect("a time");
        stream
    }

    /// Sends a request and reads all of the answer.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
        self.send_bare(&format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n{JSON}{headers}"), body)
    }

    /// As [`send`](Self::send), with a head to which the length alone is added.
    pub(crate) fn send_bare(&self, head: &str, body: &[u8]) -> Answer {
        let mut stream = self.connect();
        let head = format!("{head}Connection: close\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(&[head.as_bytes(), body].concat()).expect("it reads");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("an answer");
        let answer = String::from_utf8(answer).expect("UTF-8");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        let head = head.to_lowercase();
        let body = if head.contains("transfer-encoding: chunked") { unchunked(body) } else { body.to_owned() };
        Answer(status, body, head)
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, "", body.to_string().as_bytes())
    }

    fn get(&self, path: &str) -> Answer {
        self.send("GET", path, "", b"")
    }

    /// The first choice of a completion.
    pub(crate) fn completion(&self, body: &Value) -> Value {
        let answer = self.post("/v1/completions", body);
        assert_eq!(answer.0, 200, "{}", answer.1);
        answer.json()["choices"][0].clone()
    }

    /// A number of `/metrics`.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics").1;
        let line = text.lines().find(|line| line.starts_with(&format!("{name} "))).expect(name);
        line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
    }

    /// The resident memory in KiB.
    fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child().id())).expect("it runs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a size");
        line.split_whitespace().nth(1).and_then(|size| size.parse().ok()).expect("a number")
    }

    /// Asks the server to stop, and returns what it printed since it listens.
    pub(crate) fn stop(mut self) -> String {
        signal(self.child(), "TERM");
        self.printed()
    }

    fn child(&self) -> &Child {
        self.child.as_ref().expect("it was not stopped")
    }

    /// Waits until the server has ended by itself, and returns what it printed since it listens.
    fn printed(&mut self) -> String {
        text(&ended(self.child.take().expect("it was not stopped"), 0))
    }
}

/// A test that ends, also in a panic, leaves no server behind.
impl Drop for Served {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

fn unchunked(body: &str) -> String {
    let (mut text, mut rest) = (String::new(), body);
    while let Some((size, more)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).expect("a size");
        text += &more[..size];
        rest = more[size..].trim_start_matches("\r\n");
        if size == 0 {
            break;
        }
    }
    text
}

/// The events of a stream, without `[DONE]`, which must be the last.
pub(crate) fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.0, 200, "{}", answer.1);
    let mut events: Vec<&str> = answer.1.split("\n\n").filter(|event| !event.is_empty()).collect();
    assert_eq!(events.pop(), Some("data: [DONE]"), "{}", answer.1);
    events.into_iter().map(|event| json(event.strip_prefix("data: ").expect("data"))).collect()
}

pub(crate) fn dense() -> TinyRun {
    let tiny = TinyRun::new("kind = \"mha\"");
    let recipe = recipe(DENSE[0], DENSE[1]);
    write_checkpoint(&tiny.path("run"), &recipe, &random_model(&recipe, 11));
    tiny
}

/// What `generate` writes after a prompt.
fn generated(tiny: &TinyRun, checkpoint: &str, more: &str, prompt: &str) -> Value {
    let generate = format!("generate --checkpoint {checkpoint} --device cpu --json --max-new-tokens 9 {more}");
    json(&succeed(tiny.sieve(&generate).args(["--prompt", prompt])))
}

#[test]
fn served_texts_and_likelihoods_of_every_kind_are_those_of_generate_and_eval() {
    let tiny = TinyRun::new("kind = \"mha\"");
    let prompts = ["t5 t9 t11", "t1 t2 t3 t4 t5 t6 t7 t8 t9 t10 t11 t12 t13", "t40 t3"];
    let task = "measure = \"choices\"\nprompt = \"{q}\"\nchoices = \"c\"\nlabel = \"{a}\"\n";
    tiny.write("mine.toml", task);
    let rows = prompts.map(|q| json!({"q": q, "c": ["t7 t8", "t30 t2 t77"], "a": 0}).to_string());
    tiny.write("rows.jsonl", rows.join("\n"));
    for [name, model, attention] in kinds() {
        let recipe = recipe(model, attention);
        write_checkpoint(&tiny.path(name), &recipe, &random_model(&recipe, 11));
        let served = Served::new(&tiny, name, "");
        std::thread::scope(|scope| {
            // All at once: they join one batch.
            let texts = prompts.map(|prompt| {
                let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 9, "temperature": 0});
                let served = &served;
                scope.spawn(move || served.completion(&body))
            });
            for (prompt, choice) in prompts.iter().zip(texts) {
                let choice = choice.join().expect("an answer");
                let own = generated(&tiny, name, "--temperature 0", prompt);
                assert_eq!(choice["text"], own["text"], "{name} {prompt}");
            }
        });
        tiny.prints(&format!(
            "eval tasks --checkpoint {name} --device cpu --data mine.toml=rows.jsonl --samples samples-{name}.jsonl"
        ));
        let samples = tiny.read(&format!("samples-{name}.jsonl"));
        for (prompt, row) in prompts.iter().zip(samples.lines()) {
            let row = json(row);
            let likelihoods = row["likelihoods"].as_array().expect("a list");
            for (ending, own) in ["t7 t8", "t30 t2 t77"].iter().zip(likelihoods) {
                let body = json!({"prompt": format!("{prompt} {ending}"), "max_tokens": 1, "echo": true, "logprobs": 1,
                    "temperature": 0});
                let logprobs = served.completion(&body)["logprobs"].clone();
                let found = logprobs["token_logprobs"].as_array().expect("a list");
                let (first, end) = (prompt.split(' ').count(), found.len() - 1);
                let sum: f64 = found[first..end].iter().map(|value| value.as_f64().expect("a number")).sum();
                let wanted = own["log_likelihood"].as_f64().expect("a number");
                assert!((sum - wanted).abs() < 1e-5 * wanted.abs().max(1.0), "{name} {prompt}: {sum} {wanted}");
                assert!(found[0].is_null() && logprobs["tokens"][0] == prompt.split(' ').next().expect("a word"));
            }
        }
        served.stop();
    }
}

#[test]
fn streams_samples_and_stop_texts_are_those_of_whole_answers() {
    let tiny = dense();
    let served = Served::new(&tiny, "run", "");
    let body = |more: Value| {
        let mut body = json!({"model": "tiny", "prompt": "t5 t9 t11", "max_tokens": 9, "temperature": 0.9, "seed": 4});
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        body
    };
    let whole = served.post("/v1/completions", &body(json!({"n": 3, "logprobs": 2}))).json();
    let own = generated(&tiny, "run", "--temperature 0.9 --top-p 1 --seed 5", "t5 t9 t11");
    assert_eq!(whole["choices"][1]["text"], own["text"]);
    assert_eq!(whole["usage"]["prompt_tokens"], 3);
    let options = json!({"n": 3, "logprobs": 2, "stream": true, "stream_options": {"include_usage": true}});
    let mut chunks = events(&served.post("/v1/completions", &body(options)));
    assert_eq!(chunks.pop().expect("chunks")["usage"], whole["usage"]);
    for (index, choice) in whole["choices"].as_array().expect("a list").iter().enumerate() {
        let own = || chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
        let text: String = own().map(|choice| choice["text"].as_str().expect("a text")).collect();
        assert_eq!(choice["text"], text);
        let tokens = own().flat_map(|choice| choice["logprobs"]["tokens"].as_array().expect("a list"));
        assert_eq!(choice["logprobs"]["tokens"], tokens.cloned().collect::<Value>());
        assert_eq!(own().next_back().expect("chunks")["finish_reason"], choice["finish_reason"]);
    }
    // Words of the test's tokenizer are joined by spaces.
    let greedy = served.completion(&body(json!({"temperature": 0})));
    let text = greedy["text"].as_str().expect("a text");
    let word = text.split_whitespace().nth(2).expect("nine words");
    let stopped = served.completion(&body(json!({"temperature": 0, "stop": [word, "never"]})));
    assert_eq!((&stopped["finish_reason"], &stopped["text"]), (&json!("stop"), &json!(text.split(word).next())));
    let echoed = served.completion(&body(json!({"temperature": 0, "echo": true})));
    assert_eq!(echoed["text"], format!("t5 t9 t11{text}"));
    let ids = served.completion(&body(json!({"temperature": 0, "prompt": [[5, 9, 11]]})));
    assert_eq!(ids["text"], greedy["text"]);
    let none = served.completion(&body(json!({"max_tokens": 0, "echo": true, "logprobs": 0})));
    assert_eq!(none["logprobs"]["tokens"].as_array().expect("a list").len(), 3);
    served.stop();
}

#[test]
fn what_a_server_cannot_answer_it_refuses_in_the_form_of_openai() {
    let tiny = dense();
    // One text at a time and two in the queue, so that few requests fill the server.
    let served = Served::new(&tiny, "run", "--api-key secret --max-texts 1 --max-queue 2");
    let key = "Authorization: Bearer secret\r\n";
    let post = |path: &str, body: &str| served.send("POST", path, key, body.as_bytes());
    let completion = "/v1/completions";
    for (answer, status, words) in [
        (served.send("POST", completion, "", b"{}"), 401, "invalid_api_key"),
        (served.send("POST", completion, "Authorization: Bearer secreT\r\n", b"{}"), 401, "invalid_api_key"),
        (served.get("/v1/models"), 401, "invalid_api_key"),
        (served.get("/v2"), 401, "invalid_api_key"),
        (served.send("GET", "/v2", key, b""), 404, "/v1/completions"),
        (served.send("GET", completion, key, b""), 405, "GET is not possible"),
        (served.send("GET", "/v1/models/gpt", key, b""), 404, "model_not_found"),
        (post(completion, "{"), 400, "not valid JSON"),
        (post(completion, "[]"), 400, "not a JSON object"),
        (post(completion, "{}"), 400, "prompt is missing"),
        (post(completion, r#"{"messages": []}"#), 400, "at /v1/chat/completions"),
        (post("/v1/chat/completions", r#"{"prompt": "t1"}"#), 400, "at /v1/completions"),
        (post(completion, r#"{"model": "gpt", "prompt": "t1"}"#), 404, "model_not_found"),
        (post(completion, r#"{"prompt": "t1", "max_tokens": 64}"#), 400, "context_length_exceeded"),
        (post(completion, r#"{"prompt": [1, 97]}"#), 400, "below 97"),
        (post(completion, r#"{"prompt": [1, "t1"]}"#), 400, "or a list of either"),
        (post(completion, r#"{"prompt": "t1", "temperature": -1}"#), 400, "a number from 0 to 2"),
        (post(completion, r#"{"prompt": "t1", "top_p": 0}"#), 400, "above 0"),
        (post(completion, r#"{"prompt": "t1", "n": 3}"#), 400, r#""param":"n""#),
        (post(completion, r#"{"prompt": ["t1", "t2"], "n": 2}"#), 400, "--max-queue lets 2 wait"),
        (post(completion, r#"{"prompt": ["t1", "t2", "t3"]}"#), 400, r#""param":"prompt""#),
        (post(completion, r#"{"prompt": "t1", "logit_bias": {"5": 1}}"#), 400, "has no logit_bias"),
        (post(completion, r#"{"prompt": "t1", "temprature": 1}"#), 400, "temprature"),
        (post(completion, r#"{"prompt": "t1", "stop": ""}"#), 400, "stop is not a string"),
        (post(completion, &json!({"prompt": "t1", "stop": "x".repeat(4097)}).to_string()), 400, "longer than 4096"),
        (
            post(completion, r#"{"prompt": "t1", "stream_options": {"include_usage": "yes"}}"#),
            400,
            "stream_options.include_usage is not true or false",
        ),
        (post(completion, r#"{"prompt": "t1", "stream_options": {"usage": true}}"#), 400, "stream_options.usage"),
        (post(completion, r#"{"prompt": "t1", "stream_options": []}"#), 400, "stream_options is not an object"),
        (post(completion, &" ".repeat(5 << 20)), 413, "more than 4194304 bytes"),
        (served.send("GET", "/v1/models/%ff", key, b""), 404, "model_not_found"),
        (post("/v1/chat/completions", r#"{"messages": [{"role": "user", "content": "t1"}]}"#), 400, "no chat template"),
    ] {
        assert_eq!(answer.0, status, "{words}: {}", answer.1);
        let error = &answer.json()["error"];
        assert!(error.to_string().contains(words) && error["message"].is_string(), "{words}: {}", answer.1);
    }
    assert_eq!((served.get("/health").0, served.get("/metrics").0), (200, 200));
    // Of many requests at once some find the queue full; the others are answered.
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let body = r#"{"prompt": "t1 t2", "max_tokens": 60, "n": 2, "temperature": 0}"#;
        let requests: Vec<_> = (0..24).map(|_| scope.spawn(|| post(completion, body).0)).collect();
        requests.into_iter().map(|request| request.join().expect("an answer")).collect()
    });
    assert!(statuses.iter().all(|status| [200, 429].contains(status)) && statuses.contains(&200), "{statuses:?}");
    assert!(statuses.contains(&429), "{statuses:?}");
    assert!(!served.stop().contains("t1"), "a prompt was printed");
    tiny.refuses(
        "serve --checkpoint run --device cpu --port 0 --max-context 65",
        "context is 64 | hint: use at most 64",
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port();
    tiny.refuses(
        &format!("serve --checkpoint run --device cpu --port {port}"),
        "cannot listen at | hint: use a different",
    );
}

/// Fields of OpenAI and of other servers: with a value that changes nothing they are taken, with another they are
/// refused by name.
#[test]
fn fields_that_change_nothing_are_taken_and_others_are_refused_by_name() {
    let tiny = TinyRun::new("kind = \"mha\"");
    words_model::write(&tiny);
    let served = Served::new(&tiny, "metaspace", "");
    let completion = |more: Value| {
        let mut body = json!({"prompt": "The lazy", "temperature": 0});
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        served.post("/v1/completions", &body)
    };
    for (name, neutral, other) in [
        ("top_k", json!(-1), json!(-2)),
        ("top_k", json!(0), json!(1.5)),
        ("min_p", json!(0), json!(1.5)),
        ("repetition_penalty", json!(1.0), json!(0)),
        ("repeat_penalty", json!(1), json!(-1)),
        ("length_penalty", json!(1.0), json!(0.5)),
        ("presence_penalty", json!(0.0), json!(2.5)),
        ("frequency_penalty", json!(0), json!(-3)),
        ("typical_p", json!(1.0), json!(0.9)),
        ("min_tokens", json!(0), json!(3)),
        ("ignore_eos", json!(false), json!(3)),
        ("skip_special_tokens", json!(true), json!(false)),
        ("spaces_between_special_tokens", json!(false), json!("x")),
        ("include_stop_str_in_output", json!(false), json!(true)),
        ("stop_token_ids", json!([]), json!([3])),
        ("bad_words", json!([]), json!(["x"])),
        ("use_beam_search", json!(false), json!(true)),
        ("early_stopping", json!(false), json!(true)),
        ("add_special_tokens", json!(false), json!(true)),
        ("cache_prompt", json!(true), json!(3)),
        ("mirostat", json!(0), json!(2)),
        ("tools", json!([]), json!([{}])),
        ("tool_choice", json!("auto"), json!("required")),
        ("parallel_tool_calls", json!(true), json!("x")),
        ("function_call", json!("none"), json!({"name": "f"})),
        ("logit_bias", json!({}), json!({"3": 1})),
        ("chat_template_kwargs", json!({}), json!({"x": 1})),
        ("response_format", json!({"type": "text"}), json!({"type": "json"})),
        ("best_of", json!(1), json!(2)),
        ("suffix", json!(""), json!("x")),
        ("max_tokens", json!(16.0), json!(16.5)),
        ("n", json!(1.0), json!(true)),
        ("seed", json!(-3), json!(0.5)),
        ("top_p", json!(1), json!(0)),
        ("stream_options", json!({"continuous_usage_stats": false}), json!({"continuous_usage_stats": true})),
        ("user", json!("ann"), json!(null)),
    ] {
        let answer = completion(json!({name: neutral}));
        assert_eq!(answer.0, 200, "{name}: {}", answer.1);
        assert_eq!(answer.json()["choices"][0]["text"], " dog jumps", "{name}");
        if !other.is_null() {
            let answer = completion(json!({name: other}));
            let param = answer.json()["error"]["param"].as_str().unwrap_or_default().to_owned();
            assert!(answer.0 == 400 && param.starts_with(name), "{name}: {}", answer.1);
        }
    }
    // A setting of two names says one thing.
    for [name, other] in [["max_completion_tokens", "max_tokens"], ["repetition_penalty", "repeat_penalty"]] {
        let answers = [2, 1].map(|second| completion(json!({name: 2, other: second})));
        assert_eq!([answers[0].0, answers[1].0], [200, 400], "{name}: {}", answers[0].1);
        assert!(answers[1].1.contains(&format!("{name} is 2 and {other} is 1")), "{}", answers[1].1);
    }
    let chat = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "What?"}], "temperature": 0});
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        served.post("/v1/chat/completions", &body).0
    };
    for (neutral, other) in [
        (json!({"echo": false}), json!({"echo": true})),
        (json!({"add_generation_prompt": true}), json!({"add_generation_prompt": false})),
        (json!({"continue_final_message": false}), json!({"continue_final_message": true})),
        (json!({"top_logprobs": 0}), json!({"top_logprobs": 1})),
    ] {
        assert_eq!([chat(neutral.clone()), chat(other)], [200, 400], "{neutral}");
    }
    served.stop();
}

#[test]
fn codes_and_headers_are_those_of_http() {
    let tiny = TinyRun::new("kind = \"mha\"");
    words_model::write(&tiny);
    let template = "{{ raise_exception('no chat today') }}";
    tiny.write("metaspace/chat_template.jinja", template);
    let served = Served::new(&tiny, "metaspace", "--api-key secret");
    let (path, body) = ("/v1/completions", br#"{"prompt": "The lazy", "max_tokens": 1}"#);
    for (scheme, status) in [
        ("Authorization: Bearer secret\r\n", 200),
        ("Authorization: bearer secret\r\n", 200),
        ("authorization: BEARER secret\r\n", 200),
        ("Authorization: Bearer  secret\r\n", 401),
        ("Authorization: Bearersecret\r\n", 401),
        ("Authorization: Bearer\r\n", 401),
        ("Authorization: Basic secret\r\n", 401),
        ("", 401),
    ] {
        let answer = served.send("POST", path, scheme, body);
        assert_eq!((answer.0, answer.2.contains("www-authenticate: bearer")), (status, status == 401), "{scheme}");
    }
    let key = "Authorization: Bearer secret\r\n";
    for (head, status) in [
        (format!("POST {path} HTTP/1.1\r\n{key}"), 400),
        (format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nHost: y\r\n{key}"), 400),
        (format!("POST {path} HTTP/1.0\r\n{key}"), 200),
        (format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Encoding: identity\r\n"), 200),
        (format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Encoding: gzip\r\n"), 415),
        (format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Encoding: identity, br\r\n"), 415),
        (format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{key}"), 405),
        (format!("OPTIONS {path} HTTP/1.1\r\nHost: localhost\r\n{key}"), 405),
    ] {
        let answer = served.send_bare(&format!("{head}{JSON}"), body);
        assert_eq!(answer.0, status, "{head} {}", answer.1);
        assert_eq!(answer.2.contains("accept-encoding: identity"), status == 415, "{head}");
        assert_eq!(answer.2.contains("allow: post"), status == 405, "{head} {}", answer.2);
        assert!(!answer.2.contains("access-control"), "{head}");
    }
    // An error repeats no long text of the request, and names no folder of this machine.
    let long = "x".repeat(100_000);
    let named = json!({"model": long, "prompt": "The"}).to_string();
    for answer in [
        served.send("POST", path, key, named.as_bytes()),
        served.send("GET", &format!("/v1/models/{}", &long[..5000]), key, b""),
        served.send("GET", &format!("/{}", &long[..5000]), key, b""),
    ] {
        assert!(answer.0 == 404 && answer.1.len() < 400, "{}", answer.1);
    }
    let chat = json!({"messages": [{"role": "user", "content": "What?"}]}).to_string();
    let answer = served.send("POST", "/v1/chat/completions", key, chat.as_bytes());
    let message = answer.json()["error"]["message"].as_str().expect("a text").to_owned();
    assert!(answer.0 == 400 && message.contains("no chat today"), "{message}");
    assert!(!message.contains('/') && !message.contains('\n'), "{message}");
    served.stop();
}

#[test]
fn a_stop_text_that_names_a_special_token_ends_a_text_in_every_command() {
    let tiny = TinyRun::new("kind = \"mha\"");
    words_model::write(&tiny);
    let served = Served::new(&tiny, "metaspace", "");
    // The model says ` short`, `<|user|>`, ` The`, and then its end.
    for (stop, text) in [
        ("<|user|>", " short"),
        ("short<|user|>", " "),
        ("ort<|user|> T", " sh"),
        (" The", " short"),
        ("short The", " "),
        ("<|system|>", " short The"),
        ("<|user|>x", " short The"),
        ("user", " short The"),
    ] {
        let body = json!({"prompt": "Be", "max_tokens": 9, "temperature": 0, "stop": ["never", stop]});
        let whole = served.completion(&body);
        assert_eq!((&whole["text"], &whole["finish_reason"]), (&json!(text), &json!("stop")), "{stop}");
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let chunks = events(&served.post("/v1/completions", &streamed));
        let pieces = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str());
        assert_eq!(pieces.collect::<String>(), text, "{stop}");
        for samples in ["", "--samples 2"] {
            let generate = format!("generate --checkpoint metaspace --device cpu --json --temperature 0 {samples}");
            let printed = succeed(tiny.sieve(&generate).args(["--prompt", "Be", "--stop", "never", "--stop", stop]));
            for line in printed.lines().filter(|line| line.starts_with('{')) {
                assert_eq!(json(line)["text"], text, "{stop} {samples}");
            }
        }
        let stop = json!(["never", stop]);
        tiny.write(
            "mine.toml",
            format!(
                "measure = \"generation\"\nprompt = \"{{q}}\"\nanswers = \"a\"\nmax_new_tokens = 9\nstop = {stop}\n"
            ),
        );
        tiny.write("rows.jsonl", json!({"q": "Be", "a": ["x"]}).to_string());
        tiny.prints("eval tasks --checkpoint metaspace --device cpu --data mine.toml=rows.jsonl --samples s.jsonl");
        assert_eq!(json(tiny.read("s.jsonl").trim())["answer"], text, "{stop}");
    }
    served.stop();
}

/// The model has 14 tokens and 16 rows of output.
#[test]
fn log_probabilities_of_generated_tokens_are_over_all_rows_of_the_model() {
    let tiny = TinyRun::new("kind = \"mha\"");
    words_model::write(&tiny);
    let served = Served::new(&tiny, "metaspace", "");
    let logprobs = |prompt: &str, max_tokens: usize, echo: bool| {
        let body = json!({"prompt": prompt, "max_tokens": max_tokens, "echo": echo, "logprobs": 2, "temperature": 0});
        served.completion(&body)["logprobs"].clone()
    };
    let scored = logprobs("The lazy dog jumps", 0, true);
    for echo in [true, false] {
        let new = logprobs("The lazy", 2, echo);
        let first = if echo { 2 } else { 0 };
        for at in 0..2 {
            assert!(new["token_logprobs"][first + at].is_number());
            assert_eq!(new["token_logprobs"][first + at], scored["token_logprobs"][2 + at]);
        }
        let top = |one: &Value, at: usize| one["top_logprobs"][at].as_object().expect("tokens").len();
        assert_eq!(top(&new, first), top(&scored, 2));
    }
    served.stop();
}

#[test]
fn a_request_samples_as_the_models_file_says_unless_it_says_how() {
    let tiny = dense();
    tiny.prints("export --checkpoint run --out exported");
    let generation = tiny.read("exported/generation_config.json");
    let mut generation: Value = serde_json::from_str(&generation).expect("JSON");
    for (name, value) in [("temperature", json!(0.5)), ("top_k", json!(1)), ("min_p", json!(0.1))] {
        generation[name] = value;
    }
    tiny.write("exported/generation_config.json", generation.to_string());
    let served = Served::new(&tiny, "exported", "");
    let about = served.get("/v1/models").json()["data"][0].clone();
    assert_eq!(
        about["sampling"],
        json!({"temperature": 0.5, "top_p": 1.0, "top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0})
    );
    let text = |more: Value| {
        let mut body = json!({"prompt": "t5 t9 t11", "max_tokens": 9, "seed": 3});
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        served.completion(&body)["text"].clone()
    };
    let greedy = text(json!({"temperature": 0}));
    assert_eq!(text(json!({})), greedy);
    let own = generated(&tiny, "run", "--temperature 2 --top-p 1 --seed 3", "t5 t9 t11");
    assert_eq!(text(json!({"temperature": 2, "top_k": 0, "min_p": 0})), own["text"]);
    assert_ne!(own["text"], greedy);
    served.stop();
    generation["top_p"] = json!(2);
    tiny.write("exported/generation_config.json", generation.to_string());
    tiny.refuses(
        "serve --checkpoint exported --device cpu --port 0",
        "top_p is 2, not a number above 0 | correct the value",
    );
}

/// lm-evaluation-harness with `add_bos_token=True` sends the tokens that the tokenizer's template makes of a text.
#[test]
fn likelihoods_behind_a_first_token_of_the_tokenizer_are_those_of_eval_tasks() {
    let page = include_str!("../docs/serving.md");
    let command =
        page.split("```").find(|block| block.contains("lm_eval --model local-completions")).expect("it is there");
    assert!(command.contains("add_bos_token=True"), "{command}");
    let tiny = dense();
    tiny.prints("export --checkpoint run --out exported");
    let mut tokenizer: Value = serde_json::from_str(&tiny.read("exported/tokenizer.json")).expect("JSON");
    let (name, bos) = ("<|endoftext|>", 96);
    tokenizer["post_processor"] = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [bos], "tokens": [name]}}});
    tiny.write("exported/tokenizer.json", tokenizer.to_string());
    tiny.write("mine.toml", "measure = \"choices\"\nprompt = \"{q}\"\nchoices = \"c\"\nlabel = \"0\"\n");
    let (questions, endings) = (["t5 t9 t11", "t40", ""], ["t7 t8", "t30 t2 t77"]);
    let rows = questions.map(|q| json!({"q": q, "c": endings}).to_string());
    tiny.write("rows.jsonl", rows.join("\n"));
    tiny.prints("eval tasks --checkpoint exported --device cpu --data mine.toml=rows.jsonl --samples s.jsonl");
    let served = Served::new(&tiny, "exported", "");
    let ids = |text: &str| text.split_whitespace().map(|word| word[1..].parse().expect("tN")).collect::<Vec<u32>>();
    let samples = tiny.read("s.jsonl");
    for (question, row) in questions.iter().zip(samples.lines()) {
        for (at, ending) in endings.iter().enumerate() {
            let prompt = [vec![bos], ids(question), ids(ending)].concat();
            let body = json!({"prompt": prompt, "max_tokens": 1, "echo": true, "logprobs": 1, "temperature": 0});
            let found = served.completion(&body)["logprobs"]["token_logprobs"].clone();
            let found = found.as_array().expect("a list").iter().map(|value| value.as_f64().unwrap_or(0.0));
            let sum: f64 = found.skip(1 + ids(question).len()).take(ids(ending).len()).sum();
            let wanted = json(row)["likelihoods"][at]["log_likelihood"].as_f64().expect("a number");
            assert!((sum - wanted).abs() < 1e-4 * wanted.abs().max(1.0), "{question} {ending}: {sum} {wanted}");
        }
    }
    served.stop();
}

#[test]
fn bytes_and_places_of_tokens_are_those_of_the_text() {
    let tiny = TinyRun::new("kind = \"mha\"");
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoints/tiny");
    let served = Served::new(&tiny, &model.display().to_string(), "");
    let text = "fn 日本<|endoftext|>é €x";
    let scored = served.completion(&json!({"prompt": text, "max_tokens": 0, "echo": true, "logprobs": 0}));
    let part = |name: &str| scored["logprobs"][name].as_array().expect("a list").clone();
    // A token that begins behind whole characters stands where its place says.
    let chars: Vec<char> = text.chars().collect();
    let (mut found, mut end) = (0, 0);
    for (token, place) in part("tokens").iter().zip(part("text_offset")) {
        let (token, place) = (token.as_str().expect("a text"), place.as_u64().expect("a place") as usize);
        let rest: String = chars[place..].iter().collect();
        found += usize::from(rest.starts_with(token) && place >= end);
        end = place;
    }
    assert_eq!(chars.len() - 1, end, "{scored}");
    assert!(found >= 4 && found < part("tokens").len(), "{found}: {scored}");
    // Of token ids the text leaves special tokens out.
    let ids = json!({"prompt": [0, 97, 0, 98], "max_tokens": 0, "echo": true, "logprobs": 0});
    let scored = served.completion(&ids);
    let length = scored["text"].as_str().expect("a text").chars().count() as u64;
    assert!(scored["logprobs"]["text_offset"][3].as_u64().is_some_and(|place| place < length), "{scored}");
    assert_eq!(scored["logprobs"]["text_offset"][1], 0);
    // A byte that is no character of its own, with a whole character or the beginning of one behind it.
    for (ids, text, places) in [
        ([129, 129, 104, 66], "\u{fffd}é", [0, 0, 1, 2]),
        ([104, 129, 104, 66], "\u{fffd}é", [0, 1, 1, 2]),
        ([164, 164, 247, 100], "\u{fffd}日", [0, 0, 1, 1]),
    ] {
        let scored = served.completion(&json!({"prompt": [ids], "max_tokens": 0, "echo": true, "logprobs": 0}));
        assert!(scored["text"].as_str().is_some_and(|found| found.starts_with(text)), "{ids:?}: {scored}");
        assert_eq!(scored["logprobs"]["text_offset"], json!(places), "{ids:?}: {scored}");
    }
    served.stop();
    // A chat's tokens have their bytes, also where one is a part of a character.
    fs::create_dir(tiny.path("chat")).expect("it is new");
    for entry in fs::read_dir(&model).expect("a folder") {
        let path = entry.expect("readable").path();
        fs::copy(&path, tiny.path("chat").join(path.file_name().expect("a name"))).expect("writable");
    }
    fs::write(tiny.path("chat").join("chat_template.jinja"), "{{ messages[0].content }}").expect("writable");
    let served = Served::new(&tiny, "chat", "");
    // At the highest temperature some of 60 tokens are parts of characters.
    let body = json!({"messages": [{"role": "user", "content": "日本 é"}], "max_tokens": 60, "temperature": 2,
        "seed": 3, "logprobs": true, "top_logprobs": 3});
    let answer = served.post("/v1/chat/completions", &body).json();
    let choice = &answer["choices"][0];
    let tokens = choice["logprobs"]["content"].as_array().expect("a list");
    let bytes = tokens.iter().flat_map(|token| token["bytes"].as_array().into_iter().flatten());
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().expect("a byte") as u8).collect();
    assert_eq!(choice["message"]["content"], *String::from_utf8_lossy(&bytes), "{answer}");
    let is_part = |token: &&Value| {
        let text = token["token"].as_str().expect("a text");
        token["bytes"].as_array().is_some_and(|bytes| bytes.len() < text.len())
    };
    assert!(tokens.iter().any(|token| is_part(&token)), "{answer}");
    served.stop();
}

#[test]
fn a_selector_decodes_one_text_at_a_time() {
    let tiny = dense();
    let selector = "--selector quest:page=4,budget=8,dense_layers=0";
    let served = Served::new(&tiny, "run", selector);
    let about = served.get("/v1/models").json()["data"][0].clone();
    assert!(about["texts_at_once"] == 1 && about["selector"].as_str().expect("a name").starts_with("quest"), "{about}");
    let prompt = "t5 t9 t11 t1 t2 t3 t4 t5 t6 t7 t8 t9 t10 t11 t12 t13";
    let own = generated(&tiny, "run", &format!("{selector} --temperature 0"), prompt);
    let body = json!({"prompt": [prompt, prompt], "max_tokens": 9, "temperature": 0});
    let answer = served.post("/v1/completions", &body).json();
    assert_eq!([&answer["choices"][0]["text"], &answer["choices"][1]["text"]], [&own["text"]; 2]);
    let scored = served.post("/v1/completions", &json!({"prompt": prompt, "echo": true, "logprobs": 1}));
    assert_eq!(scored.0, 400, "{}", scored.1);
    served.stop();
}

#[test]
fn neither_requests_nor_clients_end_a_server_or_fill_its_memory() {
    let tiny = dense();
    let served = Served::new(&tiny, "run", "");
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let whole = json!({"model": "tiny", "prompt": ["t1 t2", "t3"], "max_tokens": 3, "temperature": 0.5, "top_p": 0.9,
        "n": 2, "stop": ["t9"], "logprobs": 2, "echo": true, "stream": false, "seed": 5,
        "structured_outputs": {"regex": "( t[0-9]{1,2}){1,9}"}})
    .to_string();
    let mut statuses = std::collections::BTreeMap::<u16, usize>::new();
    let mut first_memory = 0;
    for round in 0..1000 {
        let mut body = whole.clone().into_bytes();
        for _ in 0..random.next_u32() % 4 {
            let at = random.next_u32() as usize % body.len().max(1);
            match random.next_u32() % 4 {
                _ if body.is_empty() => break,
                0 => body[at] = random.next_u32() as u8,
                1 => _ = body.remove(at),
                2 => body.insert(at, b"{}[]\",:-0e9\\\x00\xff"[random.next_u32() as usize % 14]),
                _ => body.truncate(at.max(1)),
            }
        }
        let path = ["/v1/completions", "/v1/chat/completions"][usize::from(round % 8 == 7)];
        let answer = served.send("POST", path, "", &body);
        *statuses.entry(answer.0).or_default() += 1;
        assert!(answer.0 < 500 && serde_json::from_str::<Value>(&answer.1).is_ok(), "{body:?}: {}", answer.1);
        if round == 150 {
            first_memory = served.memory();
        }
    }
    assert!(statuses[&200] > 20 && statuses[&400] > 200, "{statuses:?}");
    // Clients that go before, while and after they ask; a client that reads nothing, and a client that never asks.
    let silent = served.connect();
    let body = json!({"prompt": "t1", "max_tokens": 60, "stream": true, "n": 40, "temperature": 1.5}).to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}");
    let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    let mut slow = served.connect();
    slow.write_all(request.as_bytes()).expect("it reads");
    for round in 0..60 {
        let mut stream = served.connect();
        let part = [&request[..40], &request[..request.len() - 5], &request][round % 3];
        stream.write_all(part.as_bytes()).expect("it reads");
    }
    drop((silent, slow));
    wait_until("texts of clients that went have left", || {
        served.metric("sieve_open_texts") == 0 && served.metric("sieve_waiting_texts") == 0
            // Only a GPU's texts have one.
            && served.metric("sieve_common_cache_tokens") == 0
    });
    let memory = served.memory();
    assert!(memory < first_memory + first_memory / 2, "{first_memory} KiB became {memory}");
    let printed = served.stop();
    assert!(!printed.contains("a bug in Sieve"), "{printed}");
}

#[test]
fn a_signal_lets_open_requests_end() {
    let tiny = dense();
    let mut served = Served::new(&tiny, "run", "");
    let mut stream = served.connect();
    // So many tokens that the request is still open when the signal comes.
    let body = json!({"prompt": "t1", "max_tokens": 60, "stream": true, "n": 16, "temperature": 0}).to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}");
    let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).expect("it reads");
    let mut first = [0; 64];
    stream.read_exact(&mut first).expect("a beginning");
    signal(served.child(), "TERM");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("an end");
    assert!(rest.contains("[DONE]"), "{rest}");
    let printed = served.printed();
    assert!(printed.contains("stopping when the open requests are answered"), "{printed}");
}
