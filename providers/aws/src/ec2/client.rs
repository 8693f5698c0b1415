//! Makes every call to EC2 and Service Quotas and names its failure; sets up credentials, region and time limits. May
//! touch the network, the environment, and the shared AWS files in the SDK's order.

use std::future::Future;
use std::time::Duration;

use aws_config::{BehaviorVersion, ConfigLoader, Region, SdkConfig};
use aws_sdk_ec2::Client;
use aws_sdk_ec2::error::{ProvideErrorMetadata, SdkError};
use aws_smithy_http_client::tls::Provider;
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use aws_smithy_runtime_api::client::http::SharedHttpClient;
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use aws_smithy_types::retry::RetryConfig;
use aws_smithy_types::timeout::TimeoutConfig;
use peerpod_base::chain::chain;
use peerpod_provider_api::Error;
use peerpod_provider_cloud::calls::{BucketLimits, Table};
use peerpod_provider_cloud::refusal::clip;
use peerpod_provider_cloud::{ApiCall, Scheduler};
use tokio::time::{Instant, timeout_at};

use crate::config::{AwsConfig, AwsCredentials};
use crate::ec2::credentials;
use crate::ec2::refusal::{AwsFailure, EBS, QUOTAS, Why};

/// Longest time until a TCP connection is established.
const CONNECT: Duration = Duration::from_secs(5);
/// Attempts of a call to the EBS direct APIs, with growing pauses between them.
const EBS_ATTEMPTS: u32 = 10;

/// Client with credentials and a region.
#[derive(Clone)]
pub(crate) struct Ec2 {
    pub client: Client,
    quotas: aws_sdk_servicequotas::Client,
    pub region: String,
    scheduler: Scheduler,
}

/// Returns the token buckets of an account, as EC2 publishes them. `RunInstances` apart, each action has its own bucket
/// in EC2. A bucket that several actions share here is thus narrower than EC2's.
pub(crate) fn table() -> Table {
    Table::new(BucketLimits::new(5.0, 50))
        .with("RunInstances", &["RunInstances"], BucketLimits::new(2.0, 5))
        .with("CreateFleet", &["CreateFleet"], BucketLimits::new(5.0, 50))
        .with("TerminateInstances", &["TerminateInstances"], BucketLimits::new(5.0, 100))
        .with("AttachVolume", &["AttachVolume"], BucketLimits::new(5.0, 50))
        .with("DescribeInstances", &["DescribeInstances"], BucketLimits::new(20.0, 100))
        .with("Describe*", &["Describe*", "Get*"], BucketLimits::new(20.0, 100))
}

impl Ec2 {
    /// Finds the credentials and the region. Reads the settings, the environment and, if neither has them, the node's
    /// metadata service; makes no EC2 call.
    pub(crate) async fn connect(config: &AwsConfig, scheduler: Scheduler) -> Result<Ec2, Error> {
        let sdk = loader(config).load().await;
        let Some(region) = sdk.region().map(ToString::to_string) else {
            return Err(Error::invalid(
                "find the AWS region: neither the configuration nor the environment nor the node's metadata \
                 names one; set provider.aws.region",
            ));
        };
        have_credentials(&sdk).await?;
        let mut ec2 = aws_sdk_ec2::config::Builder::from(&sdk);
        let mut quotas = aws_sdk_servicequotas::config::Builder::from(&sdk);
        if let Some(endpoint) = &config.endpoint {
            ec2 = ec2.endpoint_url(endpoint);
            if !is_of_ec2_alone(endpoint) {
                quotas = quotas.endpoint_url(endpoint);
            }
        }
        let quotas = aws_sdk_servicequotas::Client::from_conf(quotas.build());
        Ok(Ec2 { client: Client::from_conf(ec2.build()), quotas, region, scheduler })
    }

    /// Returns the account's limit of a quota of EC2. The call waits for no turn: Service Quotas has buckets of its own,
    /// and a preflight calls it once or twice.
    pub(crate) async fn limit(&self, code: &str, until: Instant) -> Result<f64, Error> {
        let what = format!("look up the quota {code}");
        let unanswered = |why: &str| {
            Error::transient(format!(
                "{what}: no answer from Service Quotas{why}; check the route from the node to its endpoint"
            ))
        };
        let ask = self.quotas.get_service_quota().service_code("ec2").quota_code(code);
        let answer = timeout_at(until, ask.send()).await;
        let answer = answer.map_err(|_| unanswered(" in time"))?;
        let found = answer.map_err(|error| match why(&error) {
            Why::NoAnswer(why) => unanswered(&format!(": {}", clip(&why))),
            why => AwsFailure::of(&QUOTAS, "GetServiceQuota", &what, why).error,
        })?;
        let value = found.quota.and_then(|quota| quota.value).filter(|value| *value >= 0.0);
        value.ok_or_else(|| Error::transient(format!("{what}: the answer has no value")))
    }

    /// Makes a call when it is its turn, and repeats it while EC2 throttles it. Calls of one `owner` wait behind each
    /// other. See [`ApiCall`] for the arguments.
    pub(crate) async fn call<T, E, F>(
        &self,
        action: &'static str,
        owner: &str,
        what: &str,
        until: Instant,
        ask: impl Fn() -> F,
    ) -> Result<T, AwsFailure>
    where
        E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
        F: Future<Output = Result<T, SdkError<E, HttpResponse>>>,
    {
        let call = ApiCall { action, owner, what, deadline: until };
        let asked = self.scheduler.run(call, || {
            let answer = ask();
            async move { answer.await.map_err(|error| AwsFailure::new(action, what, why(&error))) }
        });
        asked.await
    }
}

/// Whether an endpoint serves EC2 and no other service of AWS, as AWS's own endpoints do.
fn is_of_ec2_alone(endpoint: &str) -> bool {
    endpoint.contains(".amazonaws.com") || endpoint.contains(".api.aws")
}

/// Returns an HTTP client for the services of AWS and the metadata service: rustls over ring, as everywhere in this
/// project.
pub(crate) fn http() -> SharedHttpClient {
    aws_smithy_http_client::Builder::new().tls_provider(Provider::Rustls(CryptoMode::Ring)).build_https()
}

fn loader(config: &AwsConfig) -> ConfigLoader {
    let timeouts = TimeoutConfig::builder()
        .connect_timeout(CONNECT)
        .operation_attempt_timeout(config.call_timeout)
        .operation_timeout(config.call_timeout)
        .build();
    // Only the scheduler retries. The SDK would retry a lack of capacity, which EC2 answers with a 500, and would do so
    // without waiting for a turn.
    let mut loader = aws_config::defaults(BehaviorVersion::latest())
        .http_client(http())
        .retry_config(RetryConfig::disabled())
        .timeout_config(timeouts);
    if let Some(region) = &config.region {
        loader = loader.region(Region::new(region.clone()));
    }
    match &config.credentials {
        AwsCredentials::Key { id, secret, token } => {
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
        AwsCredentials::Chain => loader,
    }
}

/// Returns a client of the EBS direct APIs for the same account. The SDK repeats its calls, which are idempotent and have
/// a bucket of their own. `AWS_ENDPOINT_URL_EBS` names a private endpoint.
pub(crate) async fn ebs(config: &AwsConfig) -> aws_sdk_ebs::Client {
    let sdk = loader(config).load().await;
    let timeouts = TimeoutConfig::builder().disable_operation_timeout().build();
    let ebs = aws_sdk_ebs::config::Builder::from(&sdk)
        .retry_config(RetryConfig::standard().with_max_attempts(EBS_ATTEMPTS))
        .timeout_config(timeouts);
    aws_sdk_ebs::Client::from_conf(ebs.build())
}

/// Returns the error for a failed call to the EBS direct APIs.
pub(crate) fn ebs_failure<E>(action: &str, what: &str, error: &SdkError<E, HttpResponse>) -> Error
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
{
    AwsFailure::of(&EBS, action, what, why(error)).into()
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

fn why<E>(error: &SdkError<E, HttpResponse>) -> Why
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
{
    let text = chain(error);
    let lacks_credentials = text.to_ascii_lowercase().contains("credential");
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
        SdkError::ConstructionFailure(_) if lacks_credentials => Why::NoCredentials(text),
        SdkError::ConstructionFailure(_) => Why::Unsent(text),
        // The SDK fetches credentials while it dispatches the call; such a failure is neither a network error nor a
        // timeout.
        SdkError::DispatchFailure(failure)
            if lacks_credentials
                && !failure.as_connector_error().is_some_and(|e| e.is_io() || e.is_timeout()) =>
        {
            Why::NoCredentials(text)
        }
        SdkError::ResponseError(answer) if answer.raw().status().as_u16() < 500 => {
            let status = answer.raw().status();
            Why::NoAnswer(format!("an answer that EC2 does not send ({status}): {text}"))
        }
        _ => Why::NoAnswer(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_of_aws_serves_ec2_alone() {
        for (endpoint, is_alone) in [
            ("https://vpce-0123.ec2.eu-central-1.vpce.amazonaws.com", true),
            ("https://ec2.cn-north-1.amazonaws.com.cn", true),
            ("https://ec2.eu-central-1.api.aws", true),
            ("http://127.0.0.1:5000", false),
        ] {
            assert_eq!(is_of_ec2_alone(endpoint), is_alone, "{endpoint}");
        }
    }
}
