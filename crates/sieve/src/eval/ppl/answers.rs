//! Text of which only the answers are predicted: chats, and texts behind prompts.
use anyhow::Result;
use sieve_data::{Corpus, CorpusConfig, Format};
use sieve_hf::{ChatTemplate, LoadedModel};
use sieve_ops::DeviceBackend;
use sieve_train::chat_format_of;

/// The column of chats where no recipe names one, as most data sets call it.
const USUAL_MESSAGES: &str = "messages";

/// `corpus` with the columns in which the model's run has its answers, so that they are measured as they were trained
/// on. Plain text has no columns. A model whose recipe names none, as an export's, is asked by its chat template where
/// the rows hold no text.
pub(super) fn with_columns_of<B: DeviceBackend>(corpus: Corpus, loaded: &LoadedModel<B>) -> Result<Corpus> {
    let (data, config) = (&loaded.recipe.data, corpus.config());
    if config.format == Format::Text {
        return Ok(corpus);
    }
    if let Some(column) = &data.messages_column {
        let template = sieve_host::loaded::chat_template(&loaded.path, "leave --data out")?;
        return chats(config, column, template);
    }
    if let Some(column) = &data.prompt_column {
        let format = config.format.with_column(&data.text_column);
        let config = CorpusConfig { format, prompt_column: Some(column.clone()), ..config.clone() };
        return Ok(Corpus::open(config)?);
    }
    let fails = |corpus: &Corpus| corpus.documents().next().is_some_and(|first| first.is_err());
    // Rows that cannot be read are not passed over here.
    let strict = CorpusConfig { skip_invalid: false, ..config.clone() };
    if !fails(&Corpus::open(strict.clone())?) {
        return Ok(corpus);
    }
    let Some(template) = ChatTemplate::of_model(&loaded.path)? else {
        return Ok(corpus);
    };
    if fails(&chats(&strict, USUAL_MESSAGES, template.clone())?) {
        Ok(corpus)
    } else {
        chats(config, USUAL_MESSAGES, template)
    }
}

/// The files of `config` with chats in this column.
fn chats(config: &CorpusConfig, column: &str, template: ChatTemplate) -> Result<Corpus> {
    let corpus = Corpus::open(CorpusConfig { messages_column: Some(column.to_owned()), ..config.clone() })?;
    Ok(corpus.with_chats(Some(chat_format_of(template))))
}
