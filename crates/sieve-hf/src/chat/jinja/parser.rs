//! Reads the statements of a template. What it takes is what jinja2 takes with the tags of `transformers`.

mod expression;

use super::fault::{Fallible, Fault};
use super::lexer::{Token, TokenKind, tokens};
use super::syntax::{Body, Expr, ExprKind, FilterCall, For, MOST_DEPTH, Macro, Node, NodeKind, Target};
use std::sync::Arc;

/// Bytes of a template, at most. Published ones have 30 KiB.
const MOST_BYTES: usize = 256 << 10;

/// The statements of a template.
///
/// # Errors
/// A template that is too large or nested too deeply, or not valid.
pub(super) fn parse(template: &str) -> Fallible<Body> {
    if template.len() > MOST_BYTES {
        let what = format!("it has {} bytes, and a template may have {MOST_BYTES}", template.len());
        return Err(Fault::invalid(what, 0));
    }
    let mut parser = Parser { tokens: tokens(template)?, at: 0, depth: 0, may_break: false };
    let body = parser.body(&[])?;
    Ok(body)
}

struct Parser {
    tokens: Vec<Token>,
    at: usize,
    /// Blocks and brackets around this place.
    depth: u32,
    /// Whether a loop of this function is around this place.
    may_break: bool,
}

impl Parser {
    fn token(&self) -> &TokenKind {
        &self.tokens[self.at].kind
    }

    fn line(&self) -> u32 {
        self.tokens[self.at].line
    }

    /// The current token, and moves behind it; the end is never passed.
    fn advance(&mut self) -> TokenKind {
        let token = self.token().clone();
        if token != TokenKind::End {
            self.at += 1;
        }
        token
    }

    fn invalid(&self, what: impl Into<String>) -> Box<Fault> {
        Fault::invalid(what, self.line())
    }

    /// The fault of a token that is not `wanted`.
    fn unexpected(&self, wanted: &str) -> Box<Fault> {
        let found = match self.token() {
            TokenKind::Data(_) => "text".to_owned(),
            TokenKind::PrintBegin => "{{".to_owned(),
            TokenKind::PrintEnd => "}}".to_owned(),
            TokenKind::BlockBegin => "{%".to_owned(),
            TokenKind::BlockEnd => "%}".to_owned(),
            TokenKind::Name(name) => shown(name),
            TokenKind::Text(_) => "a quoted text".to_owned(),
            TokenKind::Int(_) | TokenKind::Float(_) => "a number".to_owned(),
            TokenKind::Sign(sign) => (*sign).to_owned(),
            TokenKind::End => "the end of the template".to_owned(),
        };
        self.invalid(format!("it has {found} where {wanted} must be"))
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.token(), TokenKind::Name(found) if found == name)
    }

    fn is_sign(&self, sign: &str) -> bool {
        matches!(self.token(), TokenKind::Sign(found) if *found == sign)
    }

    /// Passes this name if it is here.
    fn pass_name(&mut self, name: &str) -> bool {
        let is_here = self.is_name(name);
        self.at += usize::from(is_here);
        is_here
    }

    /// Passes this sign if it is here.
    fn pass_sign(&mut self, sign: &str) -> bool {
        let is_here = self.is_sign(sign);
        self.at += usize::from(is_here);
        is_here
    }

    fn expect_sign(&mut self, sign: &str) -> Fallible<()> {
        if self.pass_sign(sign) { Ok(()) } else { Err(self.unexpected(sign)) }
    }

    /// Passes the name that must be here, and returns it.
    fn expect_name(&mut self) -> Fallible<String> {
        let TokenKind::Name(name) = self.token() else {
            return Err(self.unexpected("a name"));
        };
        let name = name.clone();
        self.at += 1;
        Ok(name)
    }

    fn expect_block_end(&mut self) -> Fallible<()> {
        if *self.token() != TokenKind::BlockEnd {
            return Err(self.unexpected("%}"));
        }
        self.at += 1;
        Ok(())
    }

    /// Reads what is inside another block or bracket.
    fn within<T>(&mut self, read: impl FnOnce(&mut Self) -> Fallible<T>) -> Fallible<T> {
        self.depth += 1;
        // A level of brackets passes some twelve functions of this parser.
        if self.depth > MOST_DEPTH / 2 {
            return Err(
                self.invalid(format!("it has more than {} blocks and brackets within each other", MOST_DEPTH / 2))
            );
        }
        let found = read(self);
        self.depth -= 1;
        found
    }

    /// The body of a function: a loop around it is not its own.
    fn function(&mut self, ends: &[&str]) -> Fallible<Body> {
        let may_break = std::mem::replace(&mut self.may_break, false);
        let body = self.body(ends);
        self.may_break = may_break;
        body
    }

    /// Reads statements up to one of the tags in `ends`, whose name is not read yet; without `ends`, up to the end.
    fn body(&mut self, ends: &[&str]) -> Fallible<Body> {
        let begin = self.line();
        let mut body = Vec::new();
        loop {
            let line = self.line();
            match self.token() {
                TokenKind::Data(data) => {
                    let kind = NodeKind::Data(data.clone());
                    self.at += 1;
                    body.push(Node { line, kind });
                }
                TokenKind::PrintBegin => {
                    self.at += 1;
                    let kind = NodeKind::Print(self.tuple(true)?);
                    if *self.token() != TokenKind::PrintEnd {
                        return Err(self.unexpected("}}"));
                    }
                    self.at += 1;
                    body.push(Node { line, kind });
                }
                TokenKind::BlockBegin => {
                    self.at += 1;
                    if ends.iter().any(|end| self.is_name(end)) {
                        return Ok(body);
                    }
                    let kind = self.within(Self::statement)?;
                    body.push(Node { line, kind });
                }
                TokenKind::End if ends.is_empty() => return Ok(body),
                TokenKind::End => return Err(Fault::invalid(format!("a block has no {{% {} %}}", ends[0]), begin)),
                _ => return Err(self.unexpected("a statement")),
            }
        }
    }

    /// A statement, from its name to the end of its last tag.
    fn statement(&mut self) -> Fallible<NodeKind> {
        let line = self.line();
        let name = self.expect_name()?;
        match name.as_str() {
            "for" => self.loop_over(),
            "if" => self.condition(),
            "set" => self.set(),
            "with" => self.with(),
            "macro" => self.macro_(),
            "call" => self.call(),
            "filter" => {
                let filters = self.filters_of_block()?;
                self.expect_block_end()?;
                Ok(NodeKind::Filter(filters, self.function_to("endfilter")?))
            }
            "generation" => {
                self.expect_block_end()?;
                Ok(NodeKind::Generation(self.function_to("endgeneration")?))
            }
            "block" => {
                let name = self.expect_name()?;
                let _ = self.pass_name("scoped") || self.pass_name("required");
                self.expect_block_end()?;
                let body = self.function(&["endblock"])?;
                self.at += 1;
                let _ = self.pass_name(&name);
                self.expect_block_end()?;
                Ok(NodeKind::Block(body))
            }
            "break" | "continue" => {
                if !self.may_break {
                    return Err(Fault::invalid(format!("{{% {name} %}} is not in a loop"), line));
                }
                self.expect_block_end()?;
                Ok(if name == "break" { NodeKind::Break } else { NodeKind::Continue })
            }
            "include" | "import" | "from" | "extends" => {
                while !matches!(self.token(), TokenKind::BlockEnd | TokenKind::End) {
                    self.at += 1;
                }
                self.expect_block_end()?;
                Ok(NodeKind::Refused("it names another template, and a chat template must be a single file"))
            }
            _ => Err(Fault::invalid(format!("{{% {} %}} is not a tag of Jinja", shown(&name)), line)),
        }
    }

    /// The body up to the tag `end`, which is passed. A loop around it cannot be left from inside.
    fn function_to(&mut self, end: &str) -> Fallible<Body> {
        let body = self.function(&[end])?;
        self.at += 1;
        self.expect_block_end()?;
        Ok(body)
    }

    /// Reads `{% for %}`, whose name is passed, with its condition and its `else`, to the end of `{% endfor %}`.
    fn loop_over(&mut self) -> Fallible<NodeKind> {
        let target = self.target(false)?;
        if !self.pass_name("in") {
            return Err(self.unexpected("in"));
        }
        let items = self.tuple(false)?;
        let condition = if self.pass_name("if") { Some(self.expression()?) } else { None };
        let is_recursive = self.pass_name("recursive");
        self.expect_block_end()?;
        let start = self.at;
        let may_break = std::mem::replace(&mut self.may_break, true);
        let body = self.body(&["endfor", "else"])?;
        self.may_break = may_break;
        let names_loop = self.names_of(start, "loop");
        let otherwise = if self.pass_name("else") {
            self.expect_block_end()?;
            self.body(&["endfor"])?
        } else {
            Vec::new()
        };
        self.at += 1;
        self.expect_block_end()?;
        let found = For { target, items, condition, is_recursive, names_loop, body, otherwise };
        Ok(NodeKind::For(Arc::new(found)))
    }

    /// Whether this name is among the tokens from `start` to here.
    fn names_of(&self, start: usize, name: &str) -> bool {
        self.tokens[start..self.at].iter().any(|token| matches!(&token.kind, TokenKind::Name(found) if found == name))
    }

    /// Reads `{% if %}`, whose name is passed, with all its branches, to the end of `{% endif %}`.
    fn condition(&mut self) -> Fallible<NodeKind> {
        let mut branches = Vec::new();
        let mut otherwise = Vec::new();
        loop {
            let condition = self.tuple(false)?;
            self.expect_block_end()?;
            let body = self.body(&["elif", "else", "endif"])?;
            branches.push((condition, body));
            if self.pass_name("elif") {
                continue;
            }
            if self.pass_name("else") {
                self.expect_block_end()?;
                otherwise = self.body(&["endif"])?;
            }
            self.at += 1;
            self.expect_block_end()?;
            return Ok(NodeKind::If(branches, otherwise));
        }
    }

    /// Reads `{% set x = value %}`, or `{% set x | filter %}` with the block whose text it takes, to the end of the
    /// block.
    fn set(&mut self) -> Fallible<NodeKind> {
        let target = self.target(true)?;
        if self.pass_sign("=") {
            let value = self.tuple(true)?;
            self.expect_block_end()?;
            return Ok(NodeKind::Set(target, value));
        }
        let filters = if self.pass_sign("|") { self.filters_of_block()? } else { Vec::new() };
        self.expect_block_end()?;
        Ok(NodeKind::SetBlock(target, filters, self.function_to("endset")?))
    }

    /// Reads `{% with a = 1, b = 2 %}` and its body, to the end of `{% endwith %}`.
    fn with(&mut self) -> Fallible<NodeKind> {
        let mut values = Vec::new();
        while *self.token() != TokenKind::BlockEnd {
            if !values.is_empty() {
                self.expect_sign(",")?;
            }
            let target = self.target(false)?;
            self.expect_sign("=")?;
            values.push((target, self.expression()?));
        }
        self.expect_block_end()?;
        let body = self.body(&["endwith"])?;
        self.at += 1;
        self.expect_block_end()?;
        Ok(NodeKind::With(values, body))
    }

    fn macro_(&mut self) -> Fallible<NodeKind> {
        let name = self.expect_name()?;
        let params = self.params()?;
        self.expect_block_end()?;
        Ok(NodeKind::Macro(self.macro_to("endmacro", name, params)?))
    }

    fn macro_to(&mut self, end: &str, name: String, params: Vec<(String, Option<Expr>)>) -> Fallible<Arc<Macro>> {
        let start = self.at;
        let body = self.function_to(end)?;
        let [names_varargs, names_kwargs] = ["varargs", "kwargs"].map(|name| self.names_of(start, name));
        Ok(Arc::new(Macro { name, params, body, names_varargs, names_kwargs }))
    }

    /// Reads `{% call(params) name(..) %}`, whose body becomes a macro with the name `caller`, to the end of the block.
    fn call(&mut self) -> Fallible<NodeKind> {
        let params = if self.is_sign("(") { self.params()? } else { Vec::new() };
        let call = self.expression()?;
        if !matches!(*call.kind, ExprKind::Call(..)) {
            return Err(self.invalid("{% call %} has no call"));
        }
        self.expect_block_end()?;
        Ok(NodeKind::Call(call, self.macro_to("endcall", "caller".to_owned(), params)?))
    }

    /// Names in brackets, with defaults.
    fn params(&mut self) -> Fallible<Vec<(String, Option<Expr>)>> {
        let mut params: Vec<(String, Option<Expr>)> = Vec::new();
        self.expect_sign("(")?;
        while !self.pass_sign(")") {
            if !params.is_empty() {
                self.expect_sign(",")?;
            }
            let name = self.expect_name()?;
            let default = if self.pass_sign("=") { Some(self.expression()?) } else { None };
            if default.is_none() && params.last().is_some_and(|(_, default)| default.is_some()) {
                return Err(self.invalid("a parameter without a default follows one with a default"));
            }
            params.push((name, default));
        }
        Ok(params)
    }

    /// The filters of `{% filter a | b %}`.
    fn filters_of_block(&mut self) -> Fallible<Vec<FilterCall>> {
        let mut filters = vec![self.filter_call()?];
        while self.pass_sign("|") {
            filters.push(self.filter_call()?);
        }
        Ok(filters)
    }

    /// What a value is assigned to: names, and attributes of a namespace if `has_attributes`.
    fn target(&mut self, has_attributes: bool) -> Fallible<Target> {
        let mut targets = vec![self.one_target(has_attributes)?];
        let mut is_tuple = false;
        while self.pass_sign(",") {
            is_tuple = true;
            if self.is_sign("=") || self.is_name("in") {
                break;
            }
            targets.push(self.one_target(has_attributes)?);
        }
        match targets.pop() {
            Some(target) if !is_tuple => Ok(target),
            last => Ok(Target::Tuple(targets.into_iter().chain(last).collect())),
        }
    }

    /// A name that can be set, targets in round brackets, or with `has_attributes` also `namespace.attribute`.
    fn one_target(&mut self, has_attributes: bool) -> Fallible<Target> {
        if self.pass_sign("(") {
            let target = self.within(|parser| parser.target(has_attributes))?;
            self.expect_sign(")")?;
            return Ok(target);
        }
        let name = self.expect_name()?;
        if has_attributes && self.pass_sign(".") {
            return Ok(Target::Attribute(name, self.expect_name()?));
        }
        if ["true", "false", "none", "True", "False", "None"].contains(&name.as_str()) {
            return Err(self.invalid(format!("{name} cannot be set")));
        }
        Ok(Target::Name(name))
    }
}

/// A word of the template, short enough for a sentence.
fn shown(word: &str) -> String {
    word.chars().take(40).flat_map(char::escape_debug).collect()
}
