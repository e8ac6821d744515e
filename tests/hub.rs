//! A server on this machine that answers as the Hugging Face hub does, for commands that take `hf://OWNER/NAME`.
use crate::tiny_run::{TinyRun, json as printed, refused, succeed, words_of};
use crate::words_model;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Answers for the listing and the files of repositories, by `OWNER/NAME` and the file's name. Returns the address; the
/// thread ends with the test's process.
pub(crate) fn serve(repositories: BTreeMap<String, BTreeMap<String, Vec<u8>>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = format!("http://{}", listener.local_addr().expect("it listens"));
    let repositories = Arc::new(repositories);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let repositories = Arc::clone(&repositories);
            std::thread::spawn(move || answer(stream, &repositories));
        }
    });
    address
}

/// Answers one request.
fn answer(mut stream: TcpStream, repositories: &BTreeMap<String, BTreeMap<String, Vec<u8>>>) -> Option<()> {
    let lines = BufReader::new(&stream).lines().map_while(Result::ok);
    let head = lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>();
    let path = head.first()?.split(' ').nth(1)?;
    let (status, code, body) = found(path, repositories);
    let headers = format!("X-Error-Code: {code}\r\nContent-Length: {}\r\nConnection: close\r\n", body.len());
    stream.write_all(&[format!("HTTP/1.1 {status}\r\n{headers}\r\n").as_bytes(), &body].concat()).ok()
}

/// Status, code and body of the answer to a path.
fn found(
    path: &str,
    repositories: &BTreeMap<String, BTreeMap<String, Vec<u8>>>,
) -> (&'static str, &'static str, Vec<u8>) {
    if let Some((name, revision)) = path.strip_prefix("/api/models/").and_then(|rest| rest.split_once("/revision/")) {
        let Some(files) = repositories.get(name) else {
            return ("401 Unauthorized", "RepoNotFound", Vec::new());
        };
        if revision != "main?blobs=true" {
            return ("404 Not Found", "RevisionNotFound", Vec::new());
        }
        let files = files.iter().map(|(name, bytes)| json!({"rfilename": name, "size": bytes.len()}));
        let listing = json!({"sha": COMMIT, "siblings": files.collect::<Vec<_>>()});
        return ("200 OK", "", listing.to_string().into_bytes());
    }
    let file = path[1..].split_once(&format!("/resolve/{COMMIT}/"));
    if file.is_some_and(|(name, _)| name.starts_with("gated/")) {
        return ("403 Forbidden", "GatedRepo", Vec::new());
    }
    match file.and_then(|(name, file)| repositories.get(name)?.get(file)) {
        Some(bytes) => ("200 OK", "", bytes.clone()),
        None => ("404 Not Found", "EntryNotFound", Vec::new()),
    }
}

/// The files of a folder, by name.
fn files(tiny: &TinyRun, folder: &str) -> BTreeMap<String, Vec<u8>> {
    let names = tiny.names(folder).into_iter();
    names.map(|name| (name.clone(), fs::read(tiny.path(folder).join(name)).expect("a file"))).collect()
}

/// A command that asks the hub at `address`, with a cache in the test's folder.
fn asking(tiny: &TinyRun, address: &str, args: &str) -> Command {
    let mut command = tiny.sieve(args);
    command.env("HF_ENDPOINT", address).env("HF_HOME", tiny.path("home"));
    for unset in ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
        command.env_remove(unset);
    }
    command
}

#[test]
fn models_of_the_hub_are_imported_continued_and_measured_by_name() {
    let tiny = TinyRun::dma();
    words_model::write(&tiny);
    let whole = files(&tiny, "metaspace");
    let mut pickled = whole.clone();
    let weights = pickled.remove("model.safetensors").expect("it has weights");
    pickled.insert("pytorch_model.bin".to_owned(), weights);
    let mut other = pickled.clone();
    other.insert("config.json".to_owned(), br#"{"model_type": "gemma2", "final_logit_softcapping": 30.0}"#.to_vec());
    let repositories =
        [("some/words", &whole), ("gated/words", &whole), ("old/words", &pickled), ("other/family", &other)];
    let address = serve(repositories.map(|(name, files)| (name.to_owned(), files.clone())).into());
    let said = |args: &str| succeed(&mut asking(&tiny, &address, args));
    let generate = "generate --device cpu --temperature 0 --prompt What? --chat -q --checkpoint";
    let logits = "logits --device cpu --tokens 1,2 --checkpoint";
    let first = said(&format!("{logits} hf://some/words --out named.safetensors"));
    words_of(&first, "fetching hf://some/words: | into | is at commit 0123456789abcdef");
    assert_eq!(said(&format!("{generate} hf://some/words")), said(&format!("{generate} metaspace")));
    said(&format!("{logits} metaspace --out folder.safetensors"));
    let written = |name: &str| fs::read(tiny.path(name)).expect("it was written");
    assert!(written("named.safetensors") == written("folder.safetensors"));
    let imported = said("import --from hf://some/words --out in");
    words_of(&imported, "imported as in/step-0 | hf://some/words | !fetched");
    assert!(tiny.read("in/recipe.toml").contains("sieve import --from hf://some/words"));
    tiny.write("text.txt", "The lazy dog jumps. ".repeat(40));
    let loss = |model: &str| {
        let said = said(&format!("eval ppl --device cpu --data text.txt --json --checkpoint {model}"));
        printed(&said)["loss"].as_f64().expect("a number")
    };
    assert_eq!(loss("hf://some/words"), loss("metaspace"));
    // Without a network, what was fetched is read.
    let nowhere = "http://127.0.0.1:9";
    let offline = format!("{generate} hf://some/words");
    assert_eq!(succeed(&mut asking(&tiny, nowhere, &offline)), said(&offline));
    let refuses = |address: &str, model: &str, words: &str| {
        refused(&mut asking(&tiny, address, &format!("{generate} {model}")), words);
    };
    refuses(&address, "hf://some/nothing", "there is none of this name");
    refuses(&address, "hf://some/words@nine", "the listing of nine: there is no such revision");
    refuses(&address, "hf://gated/words", "it is gated: | HF_TOKEN");
    refuses(&address, "hf://old/words", "are pickles | from_pretrained(\"old/words\")");
    // Before tokenizer and weights are looked for.
    let unknown =
        "model_type is \"gemma2\", which Sieve does not know, nor its keys final_logit_softcapping | !fetching";
    refuses(&address, "hf://other/family", unknown);
    refuses(&address, "hf://words", "is not a valid hub path for a model | hf://OWNER/NAME");
    refuses(nowhere, "hf://some/other", "the listing of main: | given up | the network");
    let mut command = asking(&tiny, &address, &format!("{generate} hf://some/other"));
    refused(command.env("HF_HUB_OFFLINE", "1"), "not on this disk, and HF_HUB_OFFLINE");
}

#[test]
fn a_run_begins_with_a_model_of_the_hub_as_with_its_import() {
    let tiny = TinyRun::dma();
    words_model::write(&tiny);
    let address = serve([("some/words.v1".to_owned(), files(&tiny, "metaspace"))].into());
    let said = |args: &str| succeed(&mut asking(&tiny, &address, args));
    tiny.write("text.txt", "The lazy dog jumps. ".repeat(400));
    said("import --from metaspace --out in --data text.txt");
    let recipe = tiny.read("in/recipe.toml").replace("\ninitial_weights = \"step-0\"", "");
    tiny.write("recipe.toml", recipe);
    let sets = "--set training.steps=2 --set training.seq_len=32 --set training.local_batch_size=1 \
                --set lr_scheduler.warmup_steps=1 --set metrics.log_freq=1 --set validation.interval=1000";
    let losses = |out: &str, begins: &str| {
        let first = said(&format!("train --recipe recipe.toml --device cpu --out {out} {sets} {begins}"));
        let lines = tiny.read(&format!("{out}/metrics.jsonl"));
        let lines = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
        (lines.filter_map(|line| line["loss"].as_f64()).collect::<Vec<_>>(), first)
    };
    let (imported, _) = losses("imported", "--branch-from in");
    assert!(imported.len() >= 2, "{imported:?}");
    let (branch, first) = losses("branch", "--branch-from hf://some/words.v1");
    assert_eq!(branch, imported);
    words_of(&first, "fetching hf://some/words.v1: | begins with | some--words");
    let (keyed, again) = losses("keyed", "--set model.initial_weights=\"hf://some/words.v1\"");
    assert_eq!(keyed, imported);
    words_of(&again, "is at commit 0123456789abcdef | !fetching");
    assert!(tiny.read("keyed/config.toml").contains("sieve/checkpoints/some--words.v1-"));
    // A run whose recipe begins with a model of the hub is resumed by the same recipe.
    let more = sets.replace("steps=2", "steps=3");
    let resumed = "--resume --set model.initial_weights=\"hf://some/words.v1\"";
    said(&format!("train --recipe recipe.toml --device cpu --out keyed {more} {resumed}"));
    let plan = said("plan --recipe recipe.toml --set model.initial_weights=\"hf://some/words.v1\"");
    words_of(&plan, "some--words.v1");
    let refuses = |args: &str, words: &str| {
        refused(
            &mut asking(&tiny, &address, &format!("train --recipe recipe.toml --device cpu --out no {args}")),
            words,
        );
    };
    refuses("--branch-from hf://some/nothing", "there is none of this name");
    refuses("--set model.initial_weights=\"hf://some/nothing\"", "model.initial_weights | there is none of this name");
    refuses("--resume-from hf://some/words.v1", "not a run to continue | --branch-from");
}
