{{/* Beginning of all names: short enough for the names of a StatefulSet's pods. */}}
{{- define "kvrecall.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $chart .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $chart | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "kvrecall.gateway" -}}{{ include "kvrecall.fullname" . }}-gateway{{- end }}
{{- define "kvrecall.worker" -}}{{ include "kvrecall.fullname" . }}-worker{{- end }}
{{- define "kvrecall.redis" -}}{{ include "kvrecall.fullname" . }}-redis{{- end }}
{{- define "kvrecall.secret" -}}{{ include "kvrecall.fullname" . }}-secrets{{- end }}

{{/* Components of kvrecall's own, with a space between two. */}}
{{- define "kvrecall.components" -}}
gateway worker{{ if gt (int .Values.worker.tensorParallel.machines) 1 }} worker-rank{{ end }}
{{- end }}

{{/* Labels that select the pods of a component: (list . "gateway"). */}}
{{- define "kvrecall.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of every object: (list . "gateway"). */}}
{{- define "kvrecall.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvrecall.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{/* An image with its tag: (list . "kvrecall-gateway"). */}}
{{- define "kvrecall.image" -}}
{{- $root := index . 0 -}}
{{- if contains "@" (index . 1) -}}{{ index . 1 }}
{{- else -}}{{ index . 1 }}:{{ default $root.Chart.AppVersion $root.Values.image.tag }}
{{- end -}}
{{- end }}

{{- define "kvrecall.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "kvrecall.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{/* Bytes of a quantity such as 1.5Gi, 500M or 1024, as an integer. */}}
{{- define "kvrecall.bytes" -}}
{{- $text := . -}}
{{- if not (kindIs "string" .) -}}{{- $text = printf "%.0f" (float64 .) -}}{{- end -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := trimPrefix $number $text -}}
{{- if or (eq $number "") (not (hasKey $units $unit)) -}}
{{- fail (printf "%s is no size: expected a number with k, M, G, T, Ki, Mi, Gi or Ti" $text) -}}
{{- end -}}
{{- printf "%.0f" (floor (mulf (float64 $number) (float64 (get $units $unit)))) -}}
{{- end }}

{{/* true where a catalog and rows are in Redis, whichever it is. */}}
{{- define "kvrecall.hasRedis" -}}
{{- if or .Values.redis.external.enabled .Values.redis.bundled.enabled -}}true{{- end -}}
{{- end }}

{{/* Most pods that a component may have. */}}
{{- define "kvrecall.mostGateways" -}}
{{- if .Values.gateway.autoscaling.enabled }}{{ .Values.gateway.autoscaling.maxReplicas }}{{ else }}{{ .Values.gateway.replicas }}{{ end -}}
{{- end }}
{{- define "kvrecall.workersScale" -}}
{{- if or .Values.worker.autoscaling.keda.enabled .Values.worker.autoscaling.hpa.enabled -}}true{{- end -}}
{{- end }}
{{- define "kvrecall.mostWorkers" -}}
{{- if include "kvrecall.workersScale" . }}{{ .Values.worker.autoscaling.maxReplicas }}{{ else }}{{ .Values.worker.replicas }}{{ end -}}
{{- end }}

{{/* Names of the Secrets, the user's or the chart's. */}}
{{- define "kvrecall.accessSecret" -}}
{{- default (include "kvrecall.secret" .) .Values.access.existingSecret -}}
{{- end }}
{{- define "kvrecall.redisSecret" -}}
{{- if and .Values.redis.external.enabled .Values.redis.external.existingSecret -}}
{{ .Values.redis.external.existingSecret }}
{{- else -}}
{{ include "kvrecall.secret" . }}
{{- end -}}
{{- end }}
{{- define "kvrecall.tlsSecret" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
{{- if eq $root.Values.tls.mode "certManager" -}}
{{ include "kvrecall.fullname" $root }}-{{ $component }}-tls
{{- else if eq $component "gateway" -}}
{{ $root.Values.tls.gatewaySecret }}
{{- else -}}
{{ $root.Values.tls.workerSecret }}
{{- end -}}
{{- end }}

{{/* Secrets in the environment of both components: the token and the catalog. */}}
{{- define "kvrecall.sharedSecretEnv" -}}
{{- $root := index . 0 -}}
{{- if or $root.Values.workerToken.existingSecret $root.Values.workerToken.value }}
- name: {{ index . 1 }}
  valueFrom:
    secretKeyRef:
      name: {{ default (include "kvrecall.secret" $root) $root.Values.workerToken.existingSecret }}
      key: worker-token
{{- end }}
{{- if include "kvrecall.hasRedis" $root }}
- name: KVRECALL_CATALOG_URL
  valueFrom: {secretKeyRef: {name: {{ include "kvrecall.redisSecret" $root }}, key: catalog-url}}
{{- end }}
{{- end }}

{{/* Settings of both components in their ConfigMaps. */}}
{{- define "kvrecall.sharedSettings" -}}
KVRECALL_LOG: json
KVRECALL_LOG_LEVEL: {{ .Values.log.level }}
KVRECALL_STORE__REDIS_NAMESPACE: {{ .Values.redis.namespace | quote }}
# Writable places: the root file system is read-only.
HOME: /tmp
KVRECALL_CACHE: /var/lib/kvrecall/cache
{{- with .Values.tracing.endpoint }}
OTEL_EXPORTER_OTLP_ENDPOINT: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "kvrecall.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvrecall.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Where a component's pods may run: (list . "gateway" .Values.gateway). */}}
{{- define "kvrecall.placement" -}}
{{- $root := index . 0 -}}{{- $values := index . 2 -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "kvrecall.selector" (list $root (index . 1)) | nindent 8 }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* The beginning of every pod: no token, no environment from Services, whose names are settings'. */}}
{{- define "kvrecall.podStart" -}}
serviceAccountName: {{ include "kvrecall.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- include "kvrecall.podSecurity" . | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The probes of a component on the port NAME: a model may take 20 minutes to load. */}}
{{- define "kvrecall.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 240
livenessProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: {{ . }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end }}

{{/* Fails unless the cluster knows a group of an operator: (list . "group/version" "what to do"). */}}
{{- define "kvrecall.require" -}}
{{- $root := index . 0 -}}
{{- if not ($root.Capabilities.APIVersions.Has (index . 1)) -}}
{{- fail (printf "the cluster has no %s: %s" (index . 1) (index . 2)) -}}
{{- end -}}
{{- end }}
