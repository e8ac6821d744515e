//! What `sieve serve` keeps on a CPU: a prompt that begins with an earlier text is read from there on, samples of one
//! prompt read it once, and no bit of an answer shows it.
use crate::random_model::{ONE_OF_EACH, kinds, random_model, recipe, write_checkpoint};
use crate::serve::Served;
use crate::tiny_run::TinyRun;
use serde_json::{Value, json};

/// The answer to a completion.
fn asked(served: &Served, more: Value) -> Value {
    let mut body = json!({"temperature": 0, "max_tokens": 6, "logprobs": 2});
    more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
    let answer = served.send("POST", "/v1/completions", "", body.to_string().as_bytes());
    assert_eq!(answer.0, 200, "{}", answer.1);
    serde_json::from_str(&answer.1).expect("JSON")
}

fn cached(answer: &Value) -> &Value {
    &answer["usage"]["prompt_tokens_details"]["cached_tokens"]
}

#[test]
fn a_second_turn_reads_only_what_is_new_and_has_the_same_bits() {
    let tiny = TinyRun::new("kind = \"mha\"");
    for [name, model, attention] in kinds().into_iter().filter(|[name, ..]| ONE_OF_EACH.contains(name)) {
        let recipe = recipe(model, attention);
        write_checkpoint(&tiny.path(name), &recipe, &random_model(&recipe, 11));
        let served = Served::new(&tiny, name, "--max-texts 3");
        let prompt = "t5 t9 t11 t40 t2 t77 t8 t1 t63";
        let first = asked(&served, json!({"prompt": prompt}));
        assert_eq!(*cached(&first), 0, "{name}");
        let more = [json!({}), json!({"n": 3, "temperature": 1, "seed": 5})].map(|mut more| {
            let text = first["choices"][0]["text"].as_str().expect("a text");
            more["prompt"] = format!("{prompt}{text} t11 t3").into();
            more
        });
        // The prompt and all of the answer but its last token. The second turn of another branch reads all again,
        // because the first one has gone on.
        let new = first["usage"]["completion_tokens"].as_u64().expect("a number");
        let second = more.clone().map(|more| asked(&served, more));
        assert_eq!(*cached(&second[0]), 9 + new - 1, "{name}");
        assert_eq!(*cached(&second[1]), 0, "{name}");
        // A prompt with another token at its beginning goes on from nothing.
        assert_eq!(*cached(&asked(&served, json!({"prompt": "t6 t9 t11 t40 t2 t77 t8 t1 t63 t4"}))), 0, "{name}");
        // Of a list of prompts each counts for itself.
        let fresh = Served::new(&tiny, name, "--max-texts 3");
        let list = ["t9 t9 t40 t2", "t8 t40 t11 t1 t2"];
        let texts = list.map(|prompt| {
            let answer = asked(&fresh, json!({"prompt": prompt}));
            format!("{prompt}{} t3", answer["choices"][0]["text"].as_str().expect("a text"))
        });
        let kept = fresh.metric("sieve_kept_prompt_tokens_total");
        let both = asked(&fresh, json!({"prompt": texts}));
        assert_eq!(*cached(&both), fresh.metric("sieve_kept_prompt_tokens_total") - kept, "{name}");
        assert!(cached(&both).as_u64() > Some(9), "{name}: {both}");
        fresh.stop();
        served.stop();
        let other = Served::new(&tiny, name, "--max-texts 1");
        for (more, second) in more.into_iter().zip(&second) {
            assert_eq!(asked(&other, more)["choices"], second["choices"], "{name}");
        }
        // Each sample is the text of its own seed.
        for (sample, seed) in (5..8).enumerate() {
            let alone = asked(&other, json!({"prompt": prompt, "temperature": 1, "seed": seed}));
            let all = asked(&other, json!({"prompt": prompt, "temperature": 1, "seed": 5, "n": 3}));
            assert_eq!(all["choices"][sample]["text"], alone["choices"][0]["text"], "{name}");
            assert_eq!(all["choices"][sample]["logprobs"], alone["choices"][0]["logprobs"], "{name}");
        }
        assert!(other.metric("sieve_kept_prompt_tokens_total") == 0, "{name}");
        other.stop();
    }
}
