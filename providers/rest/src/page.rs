//! Reads lists that a cloud divides into pages.

use std::collections::HashSet;

use peerpod_provider_api::Error;
use peerpod_provider_cloud::ApiCall;
use reqwest::Url;
use serde_json::Value;

use crate::call::Rest;
use crate::failure::Failure;
use crate::request::Request;

/// Most pages of a list; no node has a million VMs.
const MAX_PAGES: usize = 1000;

/// Most bytes of all pages of a list.
const MAX_BYTES: usize = 256 << 20;

/// Form in which a page names the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The page has the URL of the next one at this JSON pointer.
    Link(&'static str),
    /// The page has a token at this JSON pointer, which the next request has as this parameter.
    Token(&'static str, &'static str),
    /// The page has the URL of the next one at this JSON pointer. That URL lacks other parameters of the first request,
    /// so the next request has only this parameter of it.
    Part(&'static str, &'static str),
}

impl Rest {
    /// Reads all pages of a list, each by a call of its own, and gives each to `page`.
    ///
    /// # Errors
    /// The failure of a call or of `page`; [`Error::Invalid`] for a link to another host; [`Error::Transient`] for an
    /// answer that is no JSON object, for a page that names an earlier one as the next one, and for more than 1000 pages or 256 MiB. The
    /// list is never shortened.
    pub async fn pages(
        &self,
        call: ApiCall<'_>,
        first: &Request,
        next: Next,
        mut page: impl FnMut(&Value) -> Result<(), Error>,
    ) -> Result<(), Failure> {
        let broken = |why: &str| Failure::from(Error::transient(format!("{}: {why}", call.what)));
        let mut request = first.clone();
        let (mut seen, mut bytes) = (HashSet::new(), 0);
        for _ in 0..MAX_PAGES {
            if !seen.insert(request.url().clone()) {
                return Err(broken("a page of the answer names an earlier one as the next one"));
            }
            let answer = self.call(call, &request).await?;
            bytes += answer.body().len();
            if bytes > MAX_BYTES {
                return Err(broken("more than 256 MiB; one node cannot have so many"));
            }
            let body = answer.json();
            if !body.is_object() {
                return Err(broken("the answer is no JSON object"));
            }
            page(&body).map_err(|error| error.during(call.what))?;
            let Some(following) = self.following(first, next, &body).map_err(|e| e.during(call.what))? else {
                return Ok(());
            };
            request = following;
        }
        Err(broken("more than 1000 pages; one node cannot have so many"))
    }

    fn following(&self, first: &Request, next: Next, body: &Value) -> Result<Option<Request>, Error> {
        let text =
            |pointer: &str| body.pointer(pointer).and_then(Value::as_str).filter(|text| !text.is_empty());
        Ok(match next {
            Next::Link(pointer) => match text(pointer) {
                Some(link) => Some(first.clone().to(self.hosts().follow(link)?)),
                None => None,
            },
            Next::Token(pointer, parameter) => {
                text(pointer).map(|token| first.clone().query(parameter, token))
            }
            Next::Part(pointer, parameter) => match text(pointer) {
                Some(link) => {
                    let url = self.hosts().base().join(link).ok();
                    let mut pairs = url.iter().flat_map(Url::query_pairs);
                    let part = pairs.find(|(name, _)| name == parameter).map(|(_, value)| value.into_owned());
                    let odd = || Error::transient(format!("the link to the next page has no {parameter}"));
                    Some(first.clone().query(parameter, &part.ok_or_else(odd)?))
                }
                None => None,
            },
        })
    }
}
