{{/*
What runs already, as Helm sees it in a cluster. Without a cluster (`helm template`), and at an install, there is nothing.
*/}}

{{/* The number of replicas of a Deployment that an autoscaler scales: the live one, or FEWEST: (list ROOT NAME FEWEST). */}}
{{- define "lockstep.liveReplicas" -}}
{{- $live := lookup "apps/v1" "Deployment" (index . 0).Release.Namespace (index . 1) }}
{{- if $live }}{{ int $live.spec.replicas }}{{ else }}{{ int (index . 2) }}{{ end }}
{{- end }}

{{/* How the schedulers of a cell find its workers, or nothing: (list ROOT PREFIX). */}}
{{- define "lockstep.liveDiscovery" -}}
{{- $live := lookup "apps/v1" "StatefulSet" (index . 0).Release.Namespace (printf "%s-scheduler" (index . 1)) }}
{{- if $live }}
  {{- range $container := $live.spec.template.spec.containers }}
    {{- range $arg := $container.args }}
      {{- if hasPrefix "--workers=" $arg }}static{{ else if hasPrefix "--discovery=" $arg }}{{ trimPrefix "--discovery=" $arg }}{{ end }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{/*
The kind of the objects that run a cell's workers, or nothing: (list ROOT PREFIX). "StatefulSets" where each domain has
one.
*/}}
{{- define "lockstep.liveKind" -}}
{{- $root := index . 0 }}{{ $name := printf "%s-worker" (index . 1) }}{{ $namespace := $root.Release.Namespace }}
{{- $groups := "leaderworkerset.x-k8s.io/v1" }}
{{- if lookup "apps/v1" "Deployment" $namespace $name -}}
Deployment
{{- /* Before StatefulSets: it makes some of the same names. */}}
{{- else if and ($root.Capabilities.APIVersions.Has $groups) (lookup $groups "LeaderWorkerSet" $namespace $name) -}}
LeaderWorkerSet
{{- else if lookup "apps/v1" "StatefulSet" $namespace (printf "%s-0" $name) -}}
StatefulSets
{{- else if lookup "apps/v1" "StatefulSet" $namespace $name -}}
StatefulSet
{{- end }}
{{- end }}
