//! What a request asks for: its prompts, as tokens, and how they are continued.
use crate::error::ApiError;
use crate::fields::Fields;
use crate::server::Server;
use crate::structure;
use serde_json::{Value, json};
use sieve_infer::{Grammar, LogitRules, Sampling, StopTexts};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// New tokens of a completion that does not say how many, as OpenAI has it.
const DEFAULT_NEW_TOKENS: usize = 16;
/// Prompts of one request, at most.
const MOST_PROMPTS: usize = 2048;
/// New tokens that a request can name, at most. More than the context has room for are refused with the prompt.
const MOST_TOKENS: u64 = u32::MAX as u64;
/// Texts of one prompt, at most.
const MOST_SAMPLES: u64 = 128;
/// Likeliest tokens that are given beside each token, at most.
const MOST_TOP: u64 = 20;
/// Log-probabilities that answers hold together until they are written, at most; each takes some 250 bytes.
pub(crate) const MOST_SCORES: u32 = 1 << 21;
/// Stop texts, at most.
const MOST_STOPS: usize = 16;
/// Bytes of a stop text, at most: each token is compared with all of them.
const MOST_STOP_BYTES: usize = 4096;
/// Highest temperature, as OpenAI has it.
const MOST_TEMPERATURE: f64 = 2.0;

/// Largest penalty of presence and frequency, as OpenAI has it.
const MOST_PENALTY: f64 = 2.0;

/// The form of a request and of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Completion,
    Chat,
}

/// A prompt as tokens, and its text if the answer repeats it.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Arc<[u32]>,
    pub(crate) text: Option<String>,
    /// Whether `text` has the names of special tokens, as one that was sent; decoded tokens leave them out.
    pub(crate) has_special_names: bool,
    /// Tokens after the prompt, at most.
    pub(crate) max_tokens: usize,
}

/// A checked request.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) form: Form,
    pub(crate) prompts: Vec<Prompt>,
    /// Texts of each prompt; each has the next seed.
    pub(crate) num_samples: usize,
    pub(crate) sampling: Sampling,
    /// What changes logits before a token is drawn.
    pub(crate) rules: LogitRules,
    /// What each text must be, if the request names a structure.
    pub(crate) grammar: Option<Grammar>,
    pub(crate) stop: StopTexts,
    /// Whether texts go on behind an end token, up to their number of tokens (vLLM's `ignore_eos`).
    pub(crate) ignores_ends: bool,
    /// Whether the answer begins with the prompt.
    pub(crate) echo: bool,
    /// How many of the likeliest tokens are given beside each token; `None`: no log-probabilities.
    pub(crate) num_top: Option<usize>,
    /// Whether choices have the ids of the tokens that `logprobs` lists, and of their prompt (vLLM's
    /// `return_token_ids`).
    pub(crate) has_ids: bool,
    pub(crate) streams: bool,
    /// Whether a stream's last chunk has the number of tokens.
    pub(crate) has_usage: bool,
}

impl Asked {
    /// Reads a request's body.
    ///
    /// # Errors
    /// A field that is wrong, unknown or not served; another model's name; more tokens than the context.
    pub(crate) fn read(form: Form, body: &[u8], server: &Server) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let name = &server.settings.name;
        if let Some(asked) = fields.string("model")?.filter(|asked| asked != name) {
            return Err(ApiError::unknown_model(&asked, name));
        }
        // More than the context is refused with the prompt's tokens, which are not counted yet.
        let names = ["max_completion_tokens", "max_tokens"];
        let of_length = match (names.into_iter().find(|name| fields.has(name)), form) {
            (Some(name), _) => name,
            (None, Form::Completion) => "max_tokens",
            (None, Form::Chat) => "max_completion_tokens",
        };
        let max_tokens = either(names, names.map(|name| fields.count(name, [0, MOST_TOKENS])))?;
        let (echo, num_top, prompts) = match form {
            Form::Completion => {
                let num_top = fields.count("logprobs", [0, MOST_TOP])?;
                (fields.bool("echo")?, num_top, completion_prompts(&mut fields, server)?)
            }
            Form::Chat => {
                let num_top = fields.count("top_logprobs", [0, MOST_TOP])?;
                let with_logprobs = fields.bool("logprobs")?;
                if num_top.is_some_and(|num_top| num_top > 0) && !with_logprobs {
                    return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs: true"));
                }
                (false, with_logprobs.then_some(num_top.unwrap_or(0)), vec![chat_prompt(&mut fields, server)?])
            }
        };
        if echo && num_top.is_some() && server.settings.selector.is_some() {
            let message = "a server with a selector does not score prompts; sieve eval tasks --selector does";
            return Err(ApiError::invalid("logprobs", message));
        }
        let has_ids = fields.bool("return_token_ids")?;
        if has_ids && num_top.is_none() {
            let logprobs = if form == Form::Chat { "logprobs: true" } else { "logprobs: 0" };
            let message = format!("return_token_ids needs {logprobs}: ids are given beside log-probabilities");
            return Err(ApiError::invalid("return_token_ids", message));
        }
        let has_usage = wants_usage(&mut fields)?;
        let structure = structure::read(&mut fields)?;
        let mut asked = Self {
            form,
            prompts: prompts
                .into_iter()
                .map(|prompt| {
                    let max_tokens = room(form, prompt.tokens.len(), (of_length, max_tokens), server.settings.context)?;
                    Ok(Prompt { max_tokens, text: prompt.text.filter(|_| echo), ..prompt })
                })
                .collect::<Result<_, ApiError>>()?,
            num_samples: fields.count("n", [1, MOST_SAMPLES])?.unwrap_or(1),
            sampling: sampling(&mut fields, server.settings.sampling)?,
            rules: logit_rules(&mut fields, server.settings.rules)?,
            grammar: None,
            stop: StopTexts::new(&stop_texts(fields.take("stop"))?, &server.tokenizer),
            ignores_ends: fields.bool("ignore_eos")?,
            echo,
            num_top,
            has_ids,
            streams: fields.bool("stream")?,
            has_usage,
        };
        refuse_what_is_not_served(&mut fields, asked.num_samples)?;
        fields.finish()?;
        let most = server.queue.most();
        // Prompts that fit by themselves are too many by `n`.
        let param = if asked.prompts.len() > most { "prompt" } else { "n" };
        if asked.num_texts() > most {
            let message =
                format!("the request asks for {} completions, and --max-queue lets {most} wait", asked.num_texts());
            return Err(ApiError::invalid(param, message));
        }
        let num_scores = asked.num_scores();
        if num_scores > MOST_SCORES as usize {
            return Err(ApiError::too_many_scores(num_scores, MOST_SCORES));
        }
        if asked.ignores_ends && structure.is_some() {
            let message = "a text with a structure ends where the structure is complete; leave ignore_eos out";
            return Err(ApiError::invalid("ignore_eos", message));
        }
        asked.grammar = structure.map(|structure| structure.compile(&server.grammars)).transpose()?;
        Ok(asked)
    }

    /// Number of texts: samples of all prompts.
    pub(crate) fn num_texts(&self) -> usize {
        self.prompts.len() * self.num_samples
    }

    /// Log-probabilities that the answer holds at once, at most: of each token, and of the likeliest ones beside it. A
    /// stream holds those of a prompt, and sends the others one by one.
    pub(crate) fn num_scores(&self) -> usize {
        let of_prompt = |prompt: &Prompt| {
            let echoed = if self.echo { prompt.tokens.len() } else { 0 };
            echoed + if self.streams { 1 } else { prompt.max_tokens }
        };
        let num_tokens = self.prompts.iter().map(of_prompt).sum::<usize>() * self.num_samples;
        self.num_top.map_or(0, |num_top| num_tokens.saturating_mul(num_top + 1))
    }

    /// The prompt of a text. Samples of one prompt are side by side.
    pub(crate) fn prompt(&self, text: usize) -> &Prompt {
        &self.prompts[text / self.num_samples]
    }

    /// How a text is sampled.
    pub(crate) fn sampling_of(&self, text: usize) -> Sampling {
        let seed = self.sampling.seed.wrapping_add((text % self.num_samples) as u64);
        Sampling { seed, ..self.sampling }
    }
}

/// How the texts are sampled; `usual` counts where the request does not say it.
fn sampling(fields: &mut Fields, usual: Sampling) -> Result<Sampling, ApiError> {
    Ok(Sampling {
        temperature: fields.number("temperature", [0.0, MOST_TEMPERATURE], false)?.unwrap_or(usual.temperature),
        top_p: fields.number("top_p", [0.0, 1.0], true)?.unwrap_or(usual.top_p),
        top_k: fields.top_k()?.unwrap_or(usual.top_k),
        // Without a seed each request gets another text: the hasher's keys are random.
        seed: fields.seed()?.unwrap_or_else(|| RandomState::new().hash_one(0)),
    })
}

/// What changes logits before a token is drawn; `usual` counts where the request does not say it. The ranges are
/// OpenAI's and vLLM's.
fn logit_rules(fields: &mut Fields, usual: LogitRules) -> Result<LogitRules, ApiError> {
    let penalty = [-MOST_PENALTY, MOST_PENALTY];
    // llama.cpp has a name of its own.
    let names = ["repetition_penalty", "repeat_penalty"];
    let repetition = either(names, names.map(|name| fields.factor(name)))?;
    Ok(LogitRules {
        min_p: fields.number("min_p", [0.0, 1.0], false)?.unwrap_or(usual.min_p),
        repetition_penalty: repetition.unwrap_or(usual.repetition_penalty),
        presence_penalty: fields.number("presence_penalty", penalty, false)?.unwrap_or(usual.presence_penalty),
        frequency_penalty: fields.number("frequency_penalty", penalty, false)?.unwrap_or(usual.frequency_penalty),
    })
}

/// The value of a field that has two names. Both may be given if they say the same.
fn either<T: PartialEq + fmt::Display>(
    [name, other]: [&str; 2],
    values: [Result<Option<T>, ApiError>; 2],
) -> Result<Option<T>, ApiError> {
    let [value, second] = values;
    match (value?, second?) {
        (Some(value), Some(second)) if value != second => {
            let message = format!("{name} is {value} and {other} is {second}, which are one setting; send one of them");
            Err(ApiError::invalid(other, message))
        }
        (value, second) => Ok(value.or(second)),
    }
}

/// Whether `stream_options` asks for the number of tokens.
fn wants_usage(fields: &mut Fields) -> Result<bool, ApiError> {
    let Some(options) = fields.take("stream_options") else {
        return Ok(false);
    };
    let mut options = Fields::inside("stream_options", options)?;
    let has_usage = options.bool("include_usage")?;
    options.lacks("continuous_usage_stats", is_false)?;
    options.finish()?;
    Ok(has_usage)
}

/// Tokens that a text may have after its prompt. `(of_length, asked)` is the request's field for them.
fn room(
    form: Form,
    prompt: usize,
    (of_length, asked): (&str, Option<usize>),
    context: usize,
) -> Result<usize, ApiError> {
    let of_prompt = match form {
        Form::Completion => "prompt",
        Form::Chat => "messages",
    };
    let too_long = |new: usize| ApiError::too_long([of_prompt, of_length], prompt, new, context);
    let room = context.checked_sub(prompt).ok_or_else(|| too_long(asked.unwrap_or(0)))?;
    match asked {
        Some(asked) if asked > room => Err(too_long(asked)),
        Some(asked) => Ok(asked),
        None if room == 0 => Err(too_long(1)),
        None if form == Form::Chat => Ok(room),
        None => Ok(room.min(DEFAULT_NEW_TOKENS)),
    }
}

impl Prompt {
    /// A prompt without room for new tokens yet. An empty one becomes the end-of-document token, as in
    /// `sieve generate`.
    fn new(tokens: Vec<u32>, text: Option<String>, has_special_names: bool, server: &Server) -> Self {
        if tokens.is_empty() {
            Self { tokens: [server.settings.eos_id].into(), text, has_special_names: false, max_tokens: 0 }
        } else {
            Self { tokens: tokens.into(), text, has_special_names, max_tokens: 0 }
        }
    }
}

/// The field `prompt`: a string, tokens, or a list of either.
fn completion_prompts(fields: &mut Fields, server: &Server) -> Result<Vec<Prompt>, ApiError> {
    let invalid = |message: &str| ApiError::invalid("prompt", message);
    let is_chat = fields.has("messages");
    let missing = || {
        if is_chat {
            invalid("prompt is missing; chats (messages) are answered at /v1/chat/completions")
        } else {
            invalid("prompt is missing")
        }
    };
    let prompts = match fields.take("prompt").ok_or_else(missing)? {
        Value::Array(values) if values.iter().any(|value| !value.is_number()) => values,
        Value::Array(values) if values.is_empty() => return Err(invalid("prompt is an empty list")),
        one => vec![one],
    };
    if prompts.len() > MOST_PROMPTS {
        return Err(invalid(&format!("prompt is a list of more than {MOST_PROMPTS}")));
    }
    let read = |prompt: Value| match prompt {
        Value::String(text) => Ok(Prompt::new(prompt_tokens("prompt", &text, server)?, Some(text), true, server)),
        Value::Array(ids) => {
            let most = server.settings.vocab_size as u64;
            let id = |id: &Value| id.as_u64().filter(|id| *id < most).map(|id| id as u32);
            let ids = ids.iter().map(id).collect::<Option<Vec<u32>>>();
            let ids = ids.ok_or_else(|| invalid(&format!("a token of prompt is not a whole number below {most}")))?;
            let text = server.tokenizer.decode(&ids).map_err(|error| invalid(&error.to_string()))?;
            Ok(Prompt::new(ids, Some(text), false, server))
        }
        _ => Err(invalid("prompt is not a string, a list of tokens, or a list of either")),
    };
    prompts.into_iter().map(read).collect()
}

/// The tokens of a prompt's text; names of special tokens in it become these tokens. Refuses a text that cannot fit
/// into the context, and a token beyond the rows of the model's embedding, as a fault of the request's field `param`.
fn prompt_tokens(param: &str, text: &str, server: &Server) -> Result<Vec<u32>, ApiError> {
    // What cannot fit is refused before it is cut into tokens, which takes seconds for megabytes.
    let context = server.settings.context;
    if let Some(longest) = server.longest_token
        && text.len() > context.saturating_mul(longest)
    {
        return Err(ApiError::too_many_bytes(param, text.len(), longest, context));
    }
    let tokens = server.tokenizer.encode_marked(text).map_err(|error| ApiError::invalid(param, error.to_string()))?;
    match tokens.iter().find(|token| **token as usize >= server.settings.vocab_size) {
        Some(token) => Err(ApiError::invalid(param, format!("the model has no row for token {token}"))),
        None => Ok(tokens),
    }
}

/// The field `messages`, as the model's chat template writes it.
fn chat_prompt(fields: &mut Fields, server: &Server) -> Result<Prompt, ApiError> {
    let invalid = |message: &str| ApiError::invalid("messages", message);
    let Some(Value::Array(messages)) = fields.take("messages") else {
        return Err(if fields.has("prompt") {
            invalid("messages is missing; a prompt is continued at /v1/completions")
        } else {
            invalid("messages is missing, or not a list")
        });
    };
    let Some(template) = &server.settings.template else {
        return Err(invalid("the model has no chat template; use /v1/completions"));
    };
    if messages.is_empty() {
        return Err(invalid("messages is empty"));
    }
    // What training reads of a message is read here too, and what it refuses is refused, by its place.
    let chat = template.read_request(Value::Array(messages)).map_err(|refusal| {
        let (place, words) = refusal.of_request();
        ApiError::invalid(&place, words)
    })?;
    let text = template.render_chat(&chat).map_err(|error| invalid(&error))?;
    Ok(Prompt::new(prompt_tokens("messages", &text, server)?, None, true, server))
}

/// The texts of `stop`: none, one, or a list.
fn stop_texts(value: Option<Value>) -> Result<Vec<String>, ApiError> {
    let texts = match value {
        None => Some(Vec::new()),
        Some(Value::String(text)) => Some(vec![text]),
        Some(Value::Array(texts)) => texts.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
        Some(_) => None,
    };
    let is_short = |text: &String| (1..=MOST_STOP_BYTES).contains(&text.len());
    texts.filter(|texts| texts.len() <= MOST_STOPS && texts.iter().all(is_short)).ok_or_else(|| {
        let message = format!(
            "stop is not a string or a list of up to {MOST_STOPS} strings, none of them empty or longer than \
             {MOST_STOP_BYTES} bytes"
        );
        ApiError::invalid("stop", message)
    })
}

/// Whether a value is an empty list or object.
fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(serde_json::Map::is_empty)
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

pub(crate) fn is_false(value: &Value) -> bool {
    value.as_bool() == Some(false)
}

fn is_true(value: &Value) -> bool {
    value.as_bool() == Some(true)
}

/// Whether a value lets the model call tools, of which there are none, or does not.
fn is_no_tool(value: &Value) -> bool {
    ["none", "auto"].iter().any(|choice| value == choice)
}

/// Which values of a field change nothing.
type ChangesNothing = fn(&Value) -> bool;

/// Fields of OpenAI, vLLM, SGLang and llama.cpp that this server lacks.
const LACKING: [(&str, ChangesNothing); 31] = [
    ("logit_bias", is_empty),
    ("tools", is_empty),
    ("functions", is_empty),
    ("modalities", |value| is_empty(value) || *value == json!(["text"])),
    ("suffix", |value| value == ""),
    ("tool_choice", is_no_tool),
    ("function_call", is_no_tool),
    ("parallel_tool_calls", Value::is_boolean),
    ("echo", is_false),
    ("top_a", is_zero),
    ("typical_p", is_one),
    ("tfs_z", is_one),
    ("length_penalty", is_one),
    ("min_tokens", is_zero),
    ("stop_token_ids", is_empty),
    ("bad_words", is_empty),
    ("include_stop_str_in_output", is_false),
    ("skip_special_tokens", is_true),
    // Special tokens are in no text, so nothing is between them.
    ("spaces_between_special_tokens", Value::is_boolean),
    ("use_beam_search", is_false),
    ("early_stopping", is_false),
    ("mirostat", is_zero),
    ("dynatemp_range", is_zero),
    ("dry_multiplier", is_zero),
    ("xtc_probability", is_zero),
    ("cache_prompt", Value::is_boolean),
    ("add_special_tokens", is_false),
    ("add_generation_prompt", is_true),
    ("continue_final_message", is_false),
    ("chat_template_kwargs", is_empty),
    ("return_tokens_as_token_ids", is_false),
];

/// Refuses fields that would change the answer and that this server lacks.
fn refuse_what_is_not_served(fields: &mut Fields, num_samples: usize) -> Result<(), ApiError> {
    for (name, changes_nothing) in LACKING {
        fields.lacks(name, changes_nothing)?;
    }
    fields.lacks("best_of", |value| value.as_u64() == Some(num_samples as u64))
}
