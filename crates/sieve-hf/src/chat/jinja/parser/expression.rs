//! Expressions, from the loosest operator to the tightest.

use super::super::syntax::{Arguments, Comparison, Operator};
use super::{Expr, ExprKind, Fallible, FilterCall, Parser, TokenKind};

impl Parser {
    /// One expression.
    pub(super) fn expression(&mut self) -> Fallible<Expr> {
        let line = self.line();
        let mut value = self.or()?;
        while self.pass_name("if") {
            let condition = self.or()?;
            let other = if self.pass_name("else") { Some(self.within(Self::expression)?) } else { None };
            value = Expr::new(ExprKind::If(value, condition, other), line)?;
        }
        Ok(value)
    }

    /// One expression, or several with commas between them; without `a if b else c` unless `has_if`.
    pub(super) fn tuple(&mut self, has_if: bool) -> Fallible<Expr> {
        let line = self.line();
        let one = |parser: &mut Self| if has_if { parser.expression() } else { parser.or() };
        let first = one(self)?;
        if !self.is_sign(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.pass_sign(",") {
            let ends = matches!(self.token(), TokenKind::PrintEnd | TokenKind::BlockEnd) || self.is_sign(")");
            if ends || self.is_name("recursive") {
                break;
            }
            items.push(one(self)?);
        }
        Expr::new(ExprKind::Tuple(items), line)
    }

    /// Values with `or` between them, from left to right.
    fn or(&mut self) -> Fallible<Expr> {
        let line = self.line();
        let mut left = self.and()?;
        while self.pass_name("or") {
            left = Expr::new(ExprKind::Or(left, self.and()?), line)?;
        }
        Ok(left)
    }

    /// Values with `and` between them, from left to right.
    fn and(&mut self) -> Fallible<Expr> {
        let line = self.line();
        let mut left = self.not()?;
        while self.pass_name("and") {
            left = Expr::new(ExprKind::And(left, self.not()?), line)?;
        }
        Ok(left)
    }

    fn not(&mut self) -> Fallible<Expr> {
        let line = self.line();
        if self.pass_name("not") {
            return Expr::new(ExprKind::Not(self.within(Self::not)?), line);
        }
        self.compare()
    }

    /// A chain of comparisons, such as `a < b == c`, as one expression; a sum alone without any.
    fn compare(&mut self) -> Fallible<Expr> {
        let line = self.line();
        let first = self.sum()?;
        let mut others = Vec::new();
        while let Some(comparison) = self.comparison() {
            others.push((comparison, self.sum()?));
        }
        if others.is_empty() { Ok(first) } else { Expr::new(ExprKind::Compare(first, others), line) }
    }

    /// Passes a sign of comparison, `in` or `not in`, if it is here.
    fn comparison(&mut self) -> Option<Comparison> {
        let signs = [
            ("==", Comparison::Equal),
            ("!=", Comparison::NotEqual),
            ("<=", Comparison::LessOrEqual),
            ("<", Comparison::Less),
            (">=", Comparison::GreaterOrEqual),
            (">", Comparison::Greater),
        ];
        if let Some((_, found)) = signs.into_iter().find(|(sign, _)| self.pass_sign(sign)) {
            return Some(found);
        }
        if self.pass_name("in") {
            return Some(Comparison::In);
        }
        let next = self.tokens.get(self.at + 1).map(|token| &token.kind);
        if self.is_name("not") && matches!(next, Some(TokenKind::Name(name)) if name == "in") {
            self.at += 2;
            return Some(Comparison::NotIn);
        }
        None
    }

    /// Operators of one level, from left to right.
    fn binary(
        &mut self,
        operators: &[(&str, Operator)],
        operand: impl Fn(&mut Self) -> Fallible<Expr>,
    ) -> Fallible<Expr> {
        let line = self.line();
        let mut left = operand(self)?;
        while let Some((_, operator)) = operators.iter().find(|(sign, _)| self.pass_sign(sign)) {
            left = Expr::new(ExprKind::Binary(*operator, left, operand(self)?), line)?;
        }
        Ok(left)
    }

    fn sum(&mut self) -> Fallible<Expr> {
        self.binary(&[("+", Operator::Add), ("-", Operator::Subtract)], Self::concat)
    }

    /// Values with `~` between them, which binds tighter than `+` and less tightly than `*`.
    fn concat(&mut self) -> Fallible<Expr> {
        let line = self.line();
        let first = self.product()?;
        if !self.is_sign("~") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.pass_sign("~") {
            items.push(self.product()?);
        }
        Expr::new(ExprKind::Concat(items), line)
    }

    /// Values with `*`, `/`, `//` or `%` between them; `**` binds tighter, and goes from left to right, too.
    fn product(&mut self) -> Fallible<Expr> {
        let operators = [
            ("*", Operator::Multiply),
            ("/", Operator::Divide),
            ("//", Operator::FloorDivide),
            ("%", Operator::Remainder),
        ];
        self.binary(&operators, |parser| parser.binary(&[("**", Operator::Power)], |parser| parser.unary(true)))
    }

    /// A value with its signs and what is behind it. Filters and tests apply to the signed value: for what is behind a
    /// sign `has_filters` is false.
    fn unary(&mut self, has_filters: bool) -> Fallible<Expr> {
        let line = self.line();
        let value = if self.pass_sign("-") {
            Expr::new(ExprKind::Negative(self.within(|parser| parser.unary(false))?), line)?
        } else if self.pass_sign("+") {
            Expr::new(ExprKind::Positive(self.within(|parser| parser.unary(false))?), line)?
        } else {
            self.primary()?
        };
        let value = self.postfix(value)?;
        if has_filters { self.filters(value) } else { Ok(value) }
    }

    /// A constant, a name, or what is in brackets; quoted texts one behind the other are one text.
    fn primary(&mut self) -> Fallible<Expr> {
        let line = self.line();
        let kind = match self.advance() {
            TokenKind::Name(name) => match name.as_str() {
                "true" | "True" => ExprKind::Bool(true),
                "false" | "False" => ExprKind::Bool(false),
                "none" | "None" => ExprKind::None,
                _ => ExprKind::Name(name),
            },
            TokenKind::Text(mut text) => {
                while let TokenKind::Text(more) = self.token() {
                    text += more;
                    self.at += 1;
                }
                ExprKind::Text(text)
            }
            TokenKind::Int(number) => ExprKind::Int(number),
            TokenKind::Float(number) => ExprKind::Float(number),
            TokenKind::Sign("(") => {
                if self.pass_sign(")") {
                    return Expr::new(ExprKind::Tuple(Vec::new()), line);
                }
                let inside = self.within(|parser| parser.tuple(true))?;
                self.expect_sign(")")?;
                return Ok(inside);
            }
            TokenKind::Sign("[") => ExprKind::List(self.items("]", |parser| parser.expression())?),
            TokenKind::Sign("{") => ExprKind::Dict(self.items("}", |parser| {
                let key = parser.expression()?;
                parser.expect_sign(":")?;
                Ok((key, parser.expression()?))
            })?),
            _ => {
                self.at -= usize::from(*self.token() != TokenKind::End);
                return Err(self.unexpected("an expression"));
            }
        };
        Expr::new(kind, line)
    }

    /// Items with commas between them, up to a bracket.
    fn items<T>(&mut self, close: &str, item: impl Fn(&mut Self) -> Fallible<T>) -> Fallible<Vec<T>> {
        let mut items = Vec::new();
        while !self.pass_sign(close) {
            if !items.is_empty() {
                self.expect_sign(",")?;
                if self.pass_sign(close) {
                    break;
                }
            }
            items.push(self.within(&item)?);
        }
        Ok(items)
    }

    /// Attributes, items and calls behind a value.
    fn postfix(&mut self, mut value: Expr) -> Fallible<Expr> {
        loop {
            let line = self.line();
            let kind = if self.pass_sign(".") {
                match self.advance() {
                    TokenKind::Name(name) => ExprKind::Attribute(value, name),
                    TokenKind::Int(index) => ExprKind::Item(value, Expr::new(ExprKind::Int(index), line)?),
                    _ => return Err(self.invalid("a point is not followed by a name")),
                }
            } else if self.pass_sign("[") {
                self.subscript(value)?
            } else if self.is_sign("(") {
                ExprKind::Call(value, self.arguments()?)
            } else {
                return Ok(value);
            };
            value = Expr::new(kind, line)?;
        }
    }

    /// What is in square brackets behind a value: an index, or a slice.
    fn subscript(&mut self, value: Expr) -> Fallible<ExprKind> {
        let mut bounds = [None, None, None];
        let (mut at, mut is_slice) = (0, false);
        while !self.pass_sign("]") {
            if self.pass_sign(":") {
                is_slice = true;
                at += 1;
            } else if at < 3 && bounds[at].is_none() {
                bounds[at] = Some(self.within(Self::expression)?);
            } else {
                return Err(self.unexpected("]"));
            }
            if at > 2 {
                return Err(self.invalid("a slice has more than three parts"));
            }
        }
        match bounds {
            bounds if is_slice => Ok(ExprKind::Slice(value, bounds)),
            [Some(index), ..] => Ok(ExprKind::Item(value, index)),
            _ => Err(self.invalid("square brackets after a value are empty")),
        }
    }

    /// Arguments in brackets.
    fn arguments(&mut self) -> Fallible<Arguments> {
        let mut arguments = Arguments::default();
        self.expect_sign("(")?;
        let mut is_first = true;
        while !self.pass_sign(")") {
            if !std::mem::take(&mut is_first) {
                self.expect_sign(",")?;
                if self.pass_sign(")") {
                    break;
                }
            }
            let next = self.tokens.get(self.at + 1).map(|token| &token.kind);
            let is_named = matches!(self.token(), TokenKind::Name(_)) && next == Some(&TokenKind::Sign("="));
            if self.pass_sign("**") {
                arguments.named_splat = Some(self.within(Self::expression)?);
            } else if self.pass_sign("*") {
                arguments.splat = Some(self.within(Self::expression)?);
            } else if is_named {
                let name = self.expect_name()?;
                self.at += 1;
                arguments.named.push((name, self.within(Self::expression)?));
            } else if arguments.named.is_empty() && arguments.named_splat.is_none() {
                arguments.positional.push(self.within(Self::expression)?);
            } else {
                return Err(self.invalid("an argument without a name follows one with a name"));
            }
        }
        Ok(arguments)
    }

    /// Filters and tests behind a value.
    fn filters(&mut self, mut value: Expr) -> Fallible<Expr> {
        loop {
            let line = self.line();
            let kind = if self.pass_sign("|") {
                let call = self.filter_call()?;
                ExprKind::Filter(value, call)
            } else if self.pass_name("is") {
                self.test(value)?
            } else if self.is_sign("(") {
                ExprKind::Call(value, self.arguments()?)
            } else {
                return Ok(value);
            };
            value = Expr::new(kind, line)?;
        }
    }

    /// A filter's name and its arguments.
    pub(super) fn filter_call(&mut self) -> Fallible<FilterCall> {
        let line = self.line();
        let mut name = self.expect_name()?;
        while self.pass_sign(".") {
            name = format!("{name}.{}", self.expect_name()?);
        }
        let arguments = if self.is_sign("(") { self.arguments()? } else { Arguments::default() };
        Ok(FilterCall { line, name, arguments })
    }

    /// Reads a test, whose `is` is passed: `not`, a name, and arguments in brackets or one value without them.
    fn test(&mut self, value: Expr) -> Fallible<ExprKind> {
        let is_negated = self.pass_name("not");
        let name = self.expect_name()?;
        let begins_value = match self.token() {
            TokenKind::Name(name) => !["else", "or", "and"].contains(&name.as_str()),
            TokenKind::Text(_) | TokenKind::Int(_) | TokenKind::Float(_) => true,
            TokenKind::Sign(sign) => ["[", "{"].contains(sign),
            _ => false,
        };
        let arguments = if self.is_sign("(") {
            self.arguments()?
        } else if begins_value {
            if self.is_name("is") {
                return Err(self.invalid("a test follows a test without brackets"));
            }
            let argument = self.primary()?;
            Arguments { positional: vec![self.postfix(argument)?], ..Arguments::default() }
        } else {
            Arguments::default()
        };
        Ok(ExprKind::Test { value, name, arguments, is_negated })
    }
}
