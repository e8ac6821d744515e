//! Answers of a structure that the request names: JSON, a JSON schema, a regular expression, one of several choices.
//!
//! A structure is compiled once a request into a [`Grammar`], which says before each token of a text which tokens may
//! come. The crate llguidance walks the vocabulary's tokens, as a trie of their bytes, along the grammar.
use crate::InferError;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, TokenParser};
use serde_json::{Value, json};
use sieve_data::Tokenizer;
use std::fmt;
use std::panic::resume_unwind;
use std::sync::{Arc, OnceLock};
use std::thread;

/// Bytes of a structure, at most: of a schema as JSON, a regular expression, or all choices.
const MOST_STRUCTURE_BYTES: usize = 64 << 10;
/// Grammars at once, at most. Each may hold [`LIMITS`]' states in memory.
const MOST_GRAMMARS: usize = 256;
/// The most bytes of all tokens, and of one: what a trie of toktrie holds.
const MOST_VOCABULARY_BYTES: usize = 1 << 22;
const MOST_TOKEN_BYTES: usize = 1000;

/// What a structure may cost, so that no request takes the server's memory, or the time of the texts beside its own: a
/// step takes some 5 ms at most, and a state of the lexer one to two KiB.
const LIMITS: ParserLimits = ParserLimits {
    initial_lexer_fuel: 100_000,
    step_lexer_fuel: 20_000,
    step_max_items: 20_000,
    max_items_in_row: 2000,
    max_lexer_states: 10_000,
    max_grammar_size: 50_000,
    precompute_large_lexemes: true,
    // They would hold the text.
    verbose_errors: false,
};
/// The stack of the thread that compiles a structure. llguidance follows a chain of references by recursion, and
/// [`MOST_STRUCTURE_BYTES`] hold a chain of some 3000. Pages that are not touched take no memory.
const STACK_BYTES: usize = 256 << 20;
/// Whole numbers up to this one have a number of 64 bits with a fraction, as which llguidance reads them, of their own.
const MOST_WHOLE: f64 = 9_007_199_254_740_991.0;
/// One more than the largest whole number of 64 bits.
const BEYOND_64_BITS: f64 = 9_223_372_036_854_775_808.0;
/// Limits of numbers that need not be whole are below this one.
const MOST_OF_NUMBERS: f64 = 1e18;
/// What is said of a number that [`is_held`] refuses.
const NOT_HELD: &str = ", which 64 bits do not hold both as a whole number and as one with a fraction";
/// Between the parts of JSON comes nothing, a space, or a new line with its indentation. Small models write blank lines
/// without end where they may.
const WHITE_SPACE: &str = r" |\n[ \t]{0,24}";
/// What may follow a backslash in a string. Without `u` each text is written in one way only: else a name that the
/// schema lists could come a second time in other letters, and its value would be followed by nothing.
const ESCAPES: &str = r#"nrbtf\""#;

/// What a text must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Structure {
    /// A JSON object.
    JsonObject,
    /// JSON that meets this schema. References go to the schema itself (`#/$defs/…`).
    Schema(Value),
    /// A text that this regular expression matches from beginning to end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl Structure {
    /// Bytes that a client chose.
    fn num_bytes(&self) -> usize {
        match self {
            Self::JsonObject => 0,
            Self::Schema(schema) => schema.to_string().len(),
            Self::Regex(regex) => regex.len(),
            Self::Choice(choices) => choices.iter().map(String::len).sum(),
        }
    }
}

/// Compiles structures for the vocabulary of a model.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    num_tokens: usize,
    ends: Vec<u32>,
    /// Made at the first structure. The error says why the tokenizer has none.
    factory: OnceLock<Result<ParserFactory, String>>,
    /// Has one more holder for each grammar.
    count: Arc<()>,
}

impl Grammars {
    /// For texts of the first `num_tokens` tokens of `tokenizer`, which end with one of `ends`.
    pub fn new(tokenizer: Arc<Tokenizer>, num_tokens: usize, ends: &[u32]) -> Self {
        let ends = ends.iter().copied().filter(|end| (*end as usize) < num_tokens).collect();
        Self { tokenizer, num_tokens, ends, factory: OnceLock::new(), count: Arc::default() }
    }

    /// Whether one more grammar may be compiled now.
    pub fn has_room(&self) -> bool {
        Arc::strong_count(&self.count) <= MOST_GRAMMARS
    }

    /// Compiles a structure. The first call makes the trie of all tokens, too.
    ///
    /// # Errors
    /// A structure that is too large, wrong, or asks for what llguidance lacks; a tokenizer that does not say which
    /// bytes its tokens stand for.
    pub fn compile(&self, structure: &Structure) -> Result<Grammar, InferError> {
        let num_bytes = structure.num_bytes();
        if num_bytes > MOST_STRUCTURE_BYTES {
            let what = format!("the structure has {num_bytes} bytes");
            return Err(InferError::refused(what, format!("use at most {MOST_STRUCTURE_BYTES}")));
        }
        let factory = self.factory.get_or_init(|| self.factory()).as_ref().map_err(|reason| {
            let what = format!("this model's answers cannot have a structure: {reason}");
            InferError::refused(what, "leave the structure out")
        })?;
        let refused = |reason: String| {
            let reason = in_short(&reason);
            InferError::refused(format!("the structure cannot be used: {reason}"), hint(&reason))
        };
        let compiled = || {
            let mut matcher = Matcher::new(Ok(parser(factory, structure)?));
            // A structure that allows no first token is refused here, and not where its text begins.
            matcher.compute_mask().map_err(|error| error.to_string())?;
            Ok(matcher)
        };
        let matcher = thread::scope(|scope| {
            let compiling = thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, compiled);
            let compiling = compiling.map_err(|error| format!("no thread compiles it: {error}"))?;
            compiling.join().unwrap_or_else(|panic| resume_unwind(panic))
        });
        let matcher = matcher.map_err(refused)?;
        Ok(Grammar { matcher, failure: None, _counted: Arc::new(Counted { _one_more: self.count.clone() }) })
    }

    /// The trie of the tokens' bytes. End tokens are no text in it, and special ones are left out.
    fn factory(&self) -> Result<ParserFactory, String> {
        let neighbours = "the text of its tokenizer's tokens depends on their neighbours";
        let mut words = self.tokenizer.bytes_of_tokens().ok_or(neighbours)?;
        words.resize(self.num_tokens, Vec::new());
        self.ends.iter().for_each(|end| words[*end as usize].clear());
        // No UTF-8 has this byte, with which toktrie marks special tokens.
        words.iter_mut().filter(|word| word.contains(&TokTrie::SPECIAL_TOKEN_MARKER)).for_each(Vec::clear);
        words.iter_mut().filter(|word| word.len() > MOST_TOKEN_BYTES).for_each(Vec::clear);
        let num_bytes: usize = words.iter().map(Vec::len).sum();
        if num_bytes >= MOST_VOCABULARY_BYTES {
            return Err(format!("its tokens have {num_bytes} bytes, which is too many"));
        }
        let first = *self.ends.first().ok_or("it has no end token")?;
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, first), &words).with_eos_tokens(&self.ends);
        // Texts are not cut into tokens by the trie: the model chooses each token.
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::json_slices();
        let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| error.to_string())?;
        *factory.quiet().limits_mut() = LIMITS;
        Ok(factory)
    }
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("num_tokens", &self.num_tokens).finish_non_exhaustive()
    }
}

/// Compiles a structure; the error is in the words of llguidance, or of what is counted here.
fn parser(factory: &ParserFactory, structure: &Structure) -> Result<TokenParser, String> {
    let grammar = match structure {
        Structure::JsonObject => of_schema(&json!({"type": "object"}))?,
        Structure::Schema(schema) => of_schema(schema)?,
        // Its backslash would be lost without a word.
        Structure::Regex(regex) if regex.chars().rev().take_while(|c| *c == '\\').count() % 2 == 1 => {
            return Err("the expression ends in a backslash, which escapes nothing".to_owned());
        }
        Structure::Regex(regex) => TopLevelGrammar::from_regex(regex),
        Structure::Choice(choices) => {
            let choices: Vec<String> = choices.iter().map(|text| literal(text)).collect();
            TopLevelGrammar::from_regex(&choices.join("|"))
        }
    };
    factory.create_parser(grammar).map_err(|error| error.to_string())
}

/// The grammar of a schema whose cost is within bounds, with [`WHITE_SPACE`] between the parts of its JSON.
fn of_schema(schema: &Value) -> Result<TopLevelGrammar, String> {
    let mut cost = SchemaCost::default();
    cost.count(schema)?;
    // Any JSON may be written as an object of no keyword, too.
    let mut schema = if schema == true { json!({}) } else { schema.clone() };
    if let Some(schema) = schema.as_object_mut() {
        let options = json!({"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": ESCAPES});
        schema.insert("x-guidance".to_owned(), options);
    }
    Ok(TopLevelGrammar::from_json_schema(schema))
}

/// What takes llguidance long in a schema, which is counted before it begins: it has limits of its own for all else.
#[derive(Debug, Default)]
struct SchemaCost {
    properties: usize,
    multiples: usize,
    /// Digits of all `multipleOf`, before and behind the point.
    multiple_digits: usize,
    pattern_properties: usize,
    patterns: usize,
    /// Whether two schemas act on one value, so that their patterns must both match.
    joins: bool,
}

impl SchemaCost {
    /// Adds a schema with all inside it. Names of properties count as keywords, too, which makes no schema cheaper.
    ///
    /// # Errors
    /// What there is too much of.
    fn count(&mut self, schema: &Value) -> Result<(), String> {
        let inside: Vec<&Value> = match schema {
            Value::Array(schemas) => schemas.iter().collect(),
            Value::Object(keywords) => {
                let size = |name: &str| keywords.get(name).and_then(Value::as_object).map_or(0, serde_json::Map::len);
                let listed = |name: &str| keywords.get(name).and_then(Value::as_array).map_or(0, Vec::len);
                within("properties of an object", size("properties").max(listed("required")), 400)?;
                // llguidance counts a name that comes twice as two.
                let least = keywords.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
                let has_unlisted = keywords.get("additionalProperties") != Some(&Value::Bool(false));
                if least > listed("required") as u64 + 1 && (has_unlisted || size("patternProperties") > 0) {
                    return Err(format!(
                        "minProperties is {least}, and names that are not listed may come twice: list all but one of \
                         them in required"
                    ));
                }
                self.properties += size("properties");
                within("properties", self.properties, 2000)?;
                self.pattern_properties += size("patternProperties");
                within("entries of patternProperties", self.pattern_properties, 16)?;
                self.patterns += ["pattern", "format"].iter().filter(|name| keywords.contains_key(**name)).count();
                let joined = ["$ref", "anyOf", "oneOf"].iter().filter(|name| keywords.contains_key(**name)).count();
                let acts =
                    ["properties", "patternProperties", "additionalProperties", "items", "prefixItems", "pattern"];
                let is_beside = joined > 0 && acts.iter().any(|name| keywords.contains_key(*name));
                self.joins |= keywords.contains_key("allOf") || joined > 1 || is_beside;
                if self.joins {
                    within("patterns and formats in a schema that joins several", self.patterns, 6)?;
                }
                if let Some(Value::Number(multiple)) = keywords.get("multipleOf") {
                    self.multiples += 1;
                    within("multipleOf", self.multiples, 16)?;
                    let multiple = multiple.to_string();
                    within("digits of multipleOf", num_digits(&multiple), 4)?;
                    self.multiple_digits += num_digits(&multiple) + num_decimals(&multiple);
                }
                // llguidance has 32 bits for a number that several of them divide.
                if self.joins && self.multiples > 1 {
                    within("digits of multipleOf in a schema that joins several", self.multiple_digits, 9)?;
                }
                numbers(keywords)?;
                keywords.values().collect()
            }
            _ => Vec::new(),
        };
        inside.into_iter().try_for_each(|schema| self.count(schema))
    }
}

/// Checks the numbers that an object of a schema names. llguidance reads them as numbers with a fraction, and makes 64
/// bits of the limits of whole numbers: it would allow texts beyond others, or follow them without an end.
///
/// # Errors
/// A number that it would read as another one.
fn numbers(keywords: &serde_json::Map<String, Value>) -> Result<(), String> {
    // It adds 1 to an open limit, which a large number does not hold.
    let are_whole = match keywords.get("type") {
        Some(Value::Array(types)) => types.contains(&json!("integer")) && !types.contains(&json!("number")),
        kind => kind == Some(&json!("integer")),
    };
    let is_open = ["exclusiveMinimum", "exclusiveMaximum"].iter().any(|name| keywords.contains_key(*name));
    for name in ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"] {
        let Some(Value::Number(limit)) = keywords.get(name) else { continue };
        let value = limit.as_f64().unwrap_or(f64::NAN);
        // llguidance counts a limit's digits in 64 bits.
        if !are_whole && value.abs() >= MOST_OF_NUMBERS {
            return Err(format!("{name} is {limit}: limits of numbers are followed below {MOST_OF_NUMBERS:e}"));
        }
        // Whole numbers are written with 64 bits at most, so that the highest of them are no limit.
        let allows_all =
            name.ends_with("aximum") && value >= BEYOND_64_BITS && limit.as_i64().is_none_or(|limit| limit == i64::MAX);
        if !(allows_all || is_held(limit)) {
            return Err(format!("{name} is {limit}{NOT_HELD}"));
        }
        if is_open && !allows_all && value.abs() > MOST_WHOLE {
            return Err(format!("{name} is {limit}: beside an exclusive limit they go up to {MOST_WHOLE}"));
        }
    }
    ["const", "enum"].iter().filter_map(|name| keywords.get(*name)).try_for_each(written)
}

/// Checks all numbers in a value that a schema wants to be written.
fn written(value: &Value) -> Result<(), String> {
    match value {
        Value::Array(values) => values.iter().try_for_each(written),
        Value::Object(values) => values.values().try_for_each(written),
        Value::Number(number) if !is_held(number) => Err(format!("{number} is to be written{NOT_HELD}")),
        _ => Ok(()),
    }
}

/// Whether a number stays the same as one with a fraction, and is, if whole, a number of 64 bits with a negative one.
fn is_held(number: &serde_json::Number) -> bool {
    let value = number.as_f64().unwrap_or(f64::NAN);
    value.abs() < BEYOND_64_BITS && number.as_i64().is_none_or(|whole| value as i64 == whole)
}

fn within(what: &str, count: usize, most: usize) -> Result<(), String> {
    if count > most { Err(format!("{count} {what}, and the limit is {most}")) } else { Ok(()) }
}

/// Digits of a number, but for zeros at its beginning. A power of ten that is written as one counts as many.
fn num_digits(number: &str) -> usize {
    let is_huge = number.contains('e') && !number.contains("e-");
    let mantissa = number.split('e').next().unwrap_or(number);
    let digits = mantissa.trim_end_matches(".0").chars().filter(char::is_ascii_digit).skip_while(|digit| *digit == '0');
    if is_huge { usize::MAX } else { digits.count() }
}

/// Digits of a number behind its point, as it would be written without an exponent.
fn num_decimals(number: &str) -> usize {
    let (mantissa, exponent) = number.split_once('e').unwrap_or((number, "0"));
    let written = mantissa.trim_end_matches(".0").split_once('.').map_or(0, |(_, decimals)| decimals.len());
    written.saturating_add_signed(-exponent.parse::<isize>().unwrap_or(0))
}

/// A regular expression that matches this text alone.
fn literal(text: &str) -> String {
    let is_operator = |c: char| r"\.+*?()|[]{}^$#&-~".contains(c);
    text.chars().flat_map(|c| is_operator(c).then_some('\\').into_iter().chain([c])).collect()
}

/// The first lines of an error of llguidance; it may repeat the schema, or a backtrace.
fn in_short(error: &str) -> String {
    const MOST_CHARS: usize = 300;
    let text = error.lines().take_while(|line| !line.starts_with('<')).collect::<Vec<_>>().join(" ");
    // What follows names an option of llguidance.
    let text = text.split(". Enable ").next().unwrap_or_default();
    match text {
        "NoExtensionBias" => "no token of the model's vocabulary continues it".to_owned(),
        text => text.chars().take(MOST_CHARS).collect(),
    }
}

/// How to mend a structure that failed with this error.
fn hint(error: &str) -> &'static str {
    if error.contains("oneOf") {
        "write anyOf in place of oneOf, or options that exclude each other"
    } else if ["too ", "fuel", "limit", "exceeded", "max is", "Unable to determine"]
        .iter()
        .any(|word| error.contains(word))
    {
        "make it smaller: shorter repetitions, fewer properties and options"
    } else {
        "remove what it names, or write it in another way"
    }
}

/// Which tokens may come next in a text. A clone goes on from the same place, for another text.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
    /// Why the text cannot go on.
    failure: Option<String>,
    /// Clones are one grammar, with one count.
    _counted: Arc<Counted>,
}

/// One of the grammars that are counted; clones of a grammar share it.
struct Counted {
    /// Held beside [`Grammars::count`], which knows its holders.
    _one_more: Arc<()>,
}

impl Grammar {
    /// The tokens that may come next, ascending; `None` if there are none, for the reason of
    /// [`failure`](Self::failure).
    pub(crate) fn allowed(&mut self) -> Option<Vec<u32>> {
        let mask = self.matcher.compute_mask();
        let mask = mask.map_err(|error| self.failure = Some(in_short(&error.to_string()))).ok()?;
        Some(mask.to_list())
    }

    /// Takes the next token of the text, one of those [allowed](Self::allowed).
    pub(crate) fn take(&mut self, token: u32) {
        if let Err(error) = self.matcher.consume_token(token) {
            self.failure = Some(in_short(&error.to_string()));
        }
    }

    /// Whether the text is complete and nothing may follow.
    pub(crate) fn has_ended(&self) -> bool {
        self.failure.is_none() && self.matcher.is_stopped()
    }

    /// Why no token may come next, or the last one could not be taken.
    pub(crate) fn failure(&self) -> Option<InferError> {
        let reason = self.failure.as_deref()?;
        let what = format!("the text cannot go on in its structure: {reason}");
        Some(InferError::refused(what, "use a simpler schema or expression"))
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("failure", &self.failure).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
