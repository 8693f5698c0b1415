//! The way to EC2: credentials, region, time limits, and the one place where a call is made and its failure named. May
//! touch the network, the environment, and the shared AWS files in the SDK's order.

use std::future::Future;
use std::time::Duration;

use aws_config::{BehaviorVersion, ConfigLoader, Region, SdkConfig};
use aws_sdk_ec2::Client;
use aws_sdk_ec2::error::{ProvideErrorMetadata, SdkError};
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};
use aws_smithy_runtime_api::client::http::SharedHttpClient;
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use aws_smithy_types::retry::RetryConfig;
use aws_smithy_types::timeout::TimeoutConfig;
use parking_lot::Mutex;
use peerpod_base::chain::chain;
use peerpod_provider_api::{Error, deadline};
use peerpod_provider_cloud::calls::{Limits, Table};
use peerpod_provider_cloud::{Call, Scheduler};
use tokio::time::Instant;

use crate::config::{AwsConfig, Credentials};
use crate::ec2::credentials;
use crate::ec2::refusal::{Refusal, Why};

/// Longest way to a TCP connection.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a call may wait for its turn and its answer when nobody said how long.
const PATIENCE: Duration = Duration::from_secs(120);

/// A client that is ready to ask.
#[derive(Clone)]
pub(crate) struct Ec2 {
    pub client: Client,
    pub region: String,
    scheduler: Scheduler,
}

/// What EC2 publishes of an account's buckets (`RunInstances` apart, each action has its own; a bucket that several
/// share here is thus narrower than the cloud's).
pub(crate) fn table() -> Table {
    Table::new(Limits::new(5.0, 50))
        .with("RunInstances", &["RunInstances"], Limits::new(2.0, 5))
        .with("CreateFleet", &["CreateFleet"], Limits::new(5.0, 50))
        .with("TerminateInstances", &["TerminateInstances"], Limits::new(5.0, 100))
        .with("AttachVolume", &["AttachVolume"], Limits::new(5.0, 50))
        .with("DescribeInstances", &["DescribeInstances"], Limits::new(20.0, 100))
        .with("Describe*", &["Describe*", "Get*"], Limits::new(20.0, 100))
}

/// Until when the caller of the provider waits.
pub(crate) fn until() -> Instant {
    deadline().unwrap_or_else(|| Instant::now() + PATIENCE)
}

impl Ec2 {
    /// Finds out who and where we are. Asks the environment and, where that says nothing, the node's metadata service;
    /// not EC2.
    ///
    /// # Errors
    /// [`Error::Invalid`] without a region, [`Error::Auth`] without credentials, in plain words.
    pub(crate) async fn connect(config: &AwsConfig, scheduler: Scheduler) -> Result<Ec2, Error> {
        let sdk = loader(config).load().await;
        let Some(region) = sdk.region().map(ToString::to_string) else {
            return Err(Error::invalid(
                "find the AWS region: neither the configuration nor the environment nor the node's metadata says one; set \
                 provider.aws.region",
            ));
        };
        have_credentials(&sdk).await?;
        let mut ec2 = aws_sdk_ec2::config::Builder::from(&sdk);
        if let Some(endpoint) = &config.endpoint {
            ec2 = ec2.endpoint_url(endpoint);
        }
        Ok(Ec2 { client: Client::from_conf(ec2.build()), region, scheduler })
    }

    /// Makes a call in its turn, again while it is throttled. `owner` is on whose behalf, `what` for people.
    pub(crate) async fn call<T, E, F>(
        &self,
        action: &'static str,
        owner: &str,
        what: &str,
        until: Instant,
        ask: impl Fn() -> F,
    ) -> Result<T, Failure>
    where
        E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
        F: Future<Output = Result<T, SdkError<E, HttpResponse>>>,
    {
        let call = Call { action, owner, what, deadline: until };
        // The scheduler knows errors by class; the code is needed here, too.
        let last = Mutex::new(None);
        let refused = &last;
        let answer = self.scheduler.run(call, || {
            let answer = ask();
            async move {
                answer.await.map_err(|error| {
                    let refusal = Refusal { action, what: what.to_owned(), why: why(&error) };
                    *refused.lock() = Some(refusal.clone());
                    Error::from(refusal)
                })
            }
        });
        let answer = answer.await;
        answer.map_err(|error| {
            let refusal = last.into_inner();
            // One that was overtaken by the deadline is not this error.
            let refusal = refusal.filter(|refusal| Error::from(refusal.clone()) == error);
            Failure { error, refusal }
        })
    }
}

/// A call that brought nothing: the error as it is told, and what EC2 said, if it did.
#[derive(Debug)]
pub(crate) struct Failure {
    pub error: Error,
    refusal: Option<Refusal>,
}

impl Failure {
    /// EC2's code, or nothing.
    pub(crate) fn code(&self) -> &str {
        self.refusal.as_ref().map_or("", Refusal::code)
    }

    /// The ids in EC2's message.
    pub(crate) fn ids(&self, prefix: &str) -> Vec<String> {
        self.refusal.as_ref().map(|refusal| refusal.ids(prefix)).unwrap_or_default()
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        failure.error
    }
}

/// One HTTP client for EC2, STS and the metadata service: rustls over ring, as everywhere in this project.
pub(crate) fn http() -> SharedHttpClient {
    aws_smithy_http_client::Builder::new().tls_provider(Provider::Rustls(CryptoMode::Ring)).build_https()
}

fn loader(config: &AwsConfig) -> ConfigLoader {
    let timeouts = TimeoutConfig::builder()
        .connect_timeout(CONNECT)
        .operation_attempt_timeout(config.call_timeout)
        .operation_timeout(config.call_timeout)
        .build();
    // Ours are the only retries: the SDK's would ask again for an offering of which there are none, because that is a
    // 500, and would do it without a turn.
    let mut loader = aws_config::defaults(BehaviorVersion::latest())
        .http_client(http())
        .retry_config(RetryConfig::disabled())
        .timeout_config(timeouts);
    if let Some(region) = &config.region {
        loader = loader.region(Region::new(region.clone()));
    }
    match &config.credentials {
        Credentials::Key { id, secret, token } => {
            let token = token.as_ref().map(|token| token.expose().to_owned());
            let key = aws_sdk_ec2::config::Credentials::new(
                id.expose(),
                secret.expose(),
                token,
                None,
                "provider.aws",
            );
            loader.credentials_provider(key)
        }
        Credentials::Chain { profile: Some(profile) } => loader.profile_name(profile),
        Credentials::Chain { profile: None } => loader,
    }
}

async fn have_credentials(sdk: &SdkConfig) -> Result<(), Error> {
    use aws_sdk_ec2::config::ProvideCredentials as _;
    let why = match sdk.credentials_provider() {
        None => "the SDK has no source of credentials".to_owned(),
        Some(source) => match source.provide_credentials().await {
            Ok(_) => return Ok(()),
            Err(error) => chain(&error),
        },
    };
    let hints =
        credentials::missing(&|name| std::env::var(name).ok(), &|path| std::fs::read(path).map(drop).err());
    Err(Error::Auth { text: format!("find AWS credentials: {why}; {hints}") })
}

/// Why there was no good answer.
fn why<E>(error: &SdkError<E, HttpResponse>) -> Why
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
{
    match error {
        SdkError::ServiceError(said) => {
            let status = said.raw().status().as_u16();
            let code = said.err().code().unwrap_or(match status {
                500.. => "InternalError",
                _ => "UnknownError",
            });
            let message = said.err().message().unwrap_or("no message");
            Why::Said { code: code.to_owned(), message: message.to_owned(), status }
        }
        SdkError::ConstructionFailure(_) => match chain(error) {
            text if text.to_ascii_lowercase().contains("credential") => Why::NoCredentials(text),
            text => Why::Unsent(text),
        },
        SdkError::DispatchFailure(failure) => match failure.as_connector_error() {
            // Credentials are fetched on the way out; their failure is neither of the network nor of time.
            Some(connector) if connector.is_io() || connector.is_timeout() => Why::NoAnswer(chain(error)),
            _ => match chain(error) {
                text if text.to_ascii_lowercase().contains("credential") => Why::NoCredentials(text),
                text => Why::NoAnswer(text),
            },
        },
        SdkError::ResponseError(answer) if answer.raw().status().as_u16() < 500 => Why::NoAnswer(format!(
            "an answer that is none of EC2's ({}): {}",
            answer.raw().status(),
            chain(error)
        )),
        _ => Why::NoAnswer(chain(error)),
    }
}
